#!/bin/sh
# Install the Apptainer of tests/system/test_containers.py, as root on Debian 12, which has no package of it.
# The package of Debian's unstable release needs a newer C library. It gets one of its own, aside, and the system
# keeps its own. A mirror has only the newest files of that release: where one is missing, this script fails, and the
# tests are skipped.
set -eu
! command -v apptainer >/dev/null || exit 0
version='1.4.*'
aside=/opt/apptainer
parts=/usr/lib/$(uname -m)-linux-gnu/apptainer
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
mkdir -p "$folder/lists/partial" "$folder/packages" "$folder/patchelf" $aside
: >"$folder/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" \
    >"$folder/sources.list"
unstable() { # arguments of apt-get
    apt-get -qq -o Dir::Etc::SourceList="$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$folder/lists" -o Dir::State::Status="$folder/status" \
        -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root "$@"
}
unstable update
(cd "$folder/packages" && unstable download "apptainer=$version" libc6 libseccomp2 libsqlite3-0)
apt-get update -qq
apt-get install -qq -y --no-install-recommends --no-remove squashfs-tools
(cd "$folder/patchelf" && apt-get download -qq -o APT::Sandbox::User=root patchelf && dpkg-deb -x patchelf_*.deb .)
for package in "$folder"/packages/lib*.deb; do
    dpkg-deb -x "$package" "$folder/libraries"
done
find "$folder/libraries/usr/lib" -maxdepth 2 -name '*.so*' -exec cp -P {} $aside \;
dpkg-deb -x "$folder"/packages/apptainer_*.deb "$folder/apptainer"
for program in /usr/bin/apptainer "$parts/bin/starter"; do
    "$folder/patchelf/usr/bin/patchelf" --force-rpath --set-rpath $aside \
        --set-interpreter "$(echo $aside/ld-linux-*.so.*)" "$folder/apptainer$program"
done
# A virtual machine may have root without all of its capabilities, and Apptainer asks for all.
sed -i 's/^root default capabilities = .*/root default capabilities = no/' "$folder/apptainer/etc/apptainer/apptainer.conf"
mkdir -p /var/lib/apptainer/mnt/session
cp -a "$folder/apptainer/etc/apptainer" /etc/
cp -a "$folder/apptainer$parts" "$(dirname "$parts")"
cp -a "$folder/apptainer/usr/bin/apptainer" /usr/bin/ # last: it says that all is there
