#!/bin/sh
# Install what tests/system/test_modules.py needs, as root on Debian: Environment Modules, Lmod, shells.
# The two packages exclude each other, so Lmod is unpacked aside and told where it lies.
set -eu
aside=/opt/lmod
[ ! -e $aside/ready ] || exit 0
apt-get update -qq
apt-get install -qq -y --no-install-recommends --no-remove environment-modules zsh tcsh fish \
    lua5.3 lua-filesystem lua-json lua-posix lua-term
folder=$(mktemp -d)
(cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root lmod)
dpkg-deb -x "$folder"/lmod_*.deb $aside
rm -r "$folder"
find $aside/usr/share/lmod/lmod/init/ -type f \
    -exec sed -i "s,/usr/share/lmod,$aside/usr/share/lmod,g" {} +
touch $aside/ready
