"""Ranks in images, by the real Apptainer: jobs, signals, messages, mistakes.

`tests/system/install_apptainer.sh` installs it; without it these tests are skipped. The image has a
root of its own, with folders and variables. What takes room in a real image, namely Python and the
system's programs and libraries, is bound into it from this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import small_program
from tests.programs import ENVIRON, hpc_train, only_line, ranks_of, run
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
VENV, SOURCE = "/opt/venv", "/opt/source"  # where the image has the environment and this package
SYSTEM = ("bin", "lib", "lib64", "sbin")
OPTIONS = ("--run.steps", "60", "--checkpoint.every", "10", "--gradients.engine", "mpi")
LOOK = r"""
import os, sys
from hpc_train.mpi.runtime import start_runtime
world = start_runtime().world
message, other = bytearray(b"x" * (8 << 20)), bytearray(8 << 20)
world.comm.Sendrecv(message, 1 - world.rank, recvbuf=other, source=1 - world.rank)
assert message == other
system = open("/etc/os-release").read().strip()
words = ("seen", system, sys.executable, os.getcwd(), world.rank, world.size, os.geteuid())
os.write(1, f"{' '.join(map(str, words))}\n".encode())  # one call, or the ranks' words mix
"""


class Image:
    """An image, and the words by which ranks run in it."""

    def __init__(self, path: Path, *binds: str) -> None:
        self.path = path
        self.binds = f"--bind {','.join(binds)}"

    def options(self, *more: str) -> list[str]:
        return ["--image", str(self.path), f"--image_options={' '.join([self.binds, *more])}"]

    def without(self, *names: str) -> Image:
        kept = [b for b in self.binds.split()[1].split(",") if not b.endswith(names)]
        return Image(self.path, *kept)


def made(folder: Path) -> Image:
    root = folder / "root"
    empty = ("etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "home", VENV[1:], SOURCE[1:])
    for name in (*empty, *(f"usr/{name}" for name in (*SYSTEM, "share"))):
        (root / name).mkdir(parents=True)
    for name in SYSTEM:
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf", "localtime"):
        (root / "etc" / name).touch()
    (root / "etc/os-release").write_text("NAME=image\n")
    variables = root / ".singularity.d/env/90-environment.sh"
    variables.parent.mkdir(parents=True)
    variables.write_text(f"export PYTHONPATH={SOURCE}\nexport PATH={VENV}/bin:$PATH\n")
    built = folder / "image"
    done = run("apptainer", "build", "--sandbox", str(built), str(root))
    assert done.returncode == 0, done.stderr
    binds = [f"/usr/{name}" for name in (*SYSTEM, "share") if Path("/usr", name).is_dir()]
    if not sys.base_prefix.startswith("/usr/"):
        binds.append(sys.base_prefix)
    return Image(built, *binds, f"{sys.prefix}:{VENV}", f"{ROOT}:{SOURCE}")


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Image:
    if not shutil.which("apptainer"):
        pytest.skip("there is no apptainer: see tests/system/install_apptainer.sh")
    found = made(tmp_path_factory.mktemp("image"))
    done = run("apptainer", "exec", *found.binds.split(), str(found.path), "true")
    if done.returncode:
        pytest.skip(f"apptainer cannot run images here: {done.stderr.strip()}")
    return found


def launch(image: Image, *words: str, more: tuple[str, ...] = (), **how):
    """Two ranks in the image."""
    return run(*hpc_train("launch", "-np", "2", *image.options(*more), "--", *words), **how)


def seen(output: str) -> list[list[str]]:
    return [line.split()[1:] for line in output.splitlines() if line.startswith("seen ")]


def check_seen(output: str, folder: Path, uid: int | None = None) -> None:
    where = [f"NAME=image {VENV}/bin/python3 {folder} {n} 2".split() for n in (0, 1)]
    assert sorted(line[:5] for line in seen(output)) == where, output
    assert {line[5] for line in seen(output)} == {str(os.geteuid() if uid is None else uid)}


@pytest.fixture
def look(tmp_path):
    """A folder with the program LOOK, below one that a container does not have by itself."""
    (tmp_path / "look.py").write_text(LOOK)
    return tmp_path


@pytest.mark.parametrize("more", [(), ("--userns",)], ids=" ".join)
def test_ranks_of_one_job_have_the_images_system_and_python(image, look, more):
    """In user namespaces of their own, too, where the kernel refuses MPI's fastest copies."""
    done = launch(image, "python3", "look.py", more=more, cwd=look)
    assert done.returncode == 0, done.stderr
    check_seen(done.stdout, look)


def test_a_container_that_has_no_folder_of_the_host_by_itself(image, look, tmp_path_factory):
    """It has the working directory, and the one in which MPI's ranks meet."""
    session = tmp_path_factory.mktemp("s")
    done = launch(
        image,
        *("python3", "look.py"),
        more=("--no-mount", "tmp,home,cwd"),
        cwd=look,
        environ={"TMPDIR": str(session)},
    )
    assert done.returncode == 0, done.stderr
    check_seen(done.stdout, look)


def test_a_file_and_a_working_directory_behind_a_link(image, look):
    if not shutil.which("mksquashfs") or os.geteuid():
        pytest.skip("it takes mksquashfs and root to make such a file and to mount it")
    link = look / "link"
    link.symlink_to(look)
    file = Image(look / "image.sif", image.binds.split()[1])
    done = run("apptainer", "build", str(file.path), str(image.path))
    assert done.returncode == 0, done.stderr
    done = launch(file, "python3", "look.py", cwd=link)
    assert done.returncode == 0, done.stderr
    check_seen(done.stdout, look)


def test_an_ordinary_user(image):
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("these tests do not run as root, or there is no setpriv")
    folder = Path("/tmp", f"hpc-train-user-{os.getpid()}")
    folder.mkdir()
    try:
        (folder / "look.py").write_text(LOOK)
        shutil.copytree(image.path, folder / "image", symlinks=True)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534, follow_symlinks=False)
        theirs = Image(folder / "image", image.binds.split()[1])
        words = hpc_train("launch", "-np", "2", *theirs.options(), "--", "python3", "look.py")
        # Root's home is closed to others. In a mount namespace it is open, with Python in it.
        opened = """
            mkdir "$0/python" && mount --bind "$1" "$0/python" &&
            case $1 in /root/*) mount -t tmpfs -o mode=755 none /root && mkdir -p "$1" &&
                mount --bind "$0/python" "$1" ;; esac && shift &&
            exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all "$@"
        """
        environ = {"HOME": str(folder), "PYTHONPATH": str(ROOT)}
        start = ["unshare", "--mount", "sh", "-c", opened, str(folder), sys.base_prefix]
        done = run(*start, *words, cwd=folder, environ=environ)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    check_seen(done.stdout, folder, 65534)


@pytest.mark.parametrize("code", [2, 75])
def test_the_exit_code_of_the_ranks(image, tmp_path, code):
    done = launch(image, "python3", "-c", f"raise SystemExit({code})", cwd=tmp_path)
    assert done.returncode == code


@pytest.mark.slow("ranks start three times, and load all they need each time")
def test_a_training_is_restarted_stopped_and_resumed(image, tmp_path, text_data):
    program = small_program(tmp_path, text_data)
    words = ["launch", "-np", "2", "--max_restarts", "2", *image.options("--userns"), "--"]
    words += ["train", str(program.config), "--run.dir", str(tmp_path / "run"), *OPTIONS]
    with subprocess.Popen(
        hpc_train(*words), env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            after_step(program, 10)
            ranks_of(process)[-1].send_signal(signal.SIGKILL)
            said = process.stdout.readline()
            while "restart 1 of 2" not in said:
                assert said
                said = process.stdout.readline()
            after_step(program, max(20, program.metrics("run")[-1]["step"]))
            process.send_signal(signal.SIGUSR1)
            rest = process.stdout.read()
        finally:
            process.kill()
    assert process.returncode == 75, rest
    stopped = program.metrics("run")[-1]["step"]
    assert stopped < 60
    assert program.checkpoint("run", stopped).exists()
    done = run(*hpc_train(*words))
    assert done.returncode == 0, done.stderr
    assert program.losses("run")[-1] < program.losses("run")[0]


def after_step(program, step: int) -> None:
    """Wait until the run has recorded a step."""

    def recorded() -> bool:
        with suppress(OSError, IndexError, ValueError):  # not there yet, or half a line of it
            return program.metrics("run")[-1]["step"] >= step
        return False

    wait_until(recorded)


@pytest.mark.parametrize("launcher", [(), ("--launcher", "mpirun")])
def test_a_submitted_command_runs_in_the_image(image, look, launcher):
    """Behind `hpc-train launch`, which is told the image, and behind a line without it."""
    words = ["--run.dir", "runs/x", "--scheduler", "local", "--ranks_per_node", "2", *launcher]
    done = run(
        *hpc_train("submit", *words, *image.options("--userns"), "--", "python3", "look.py"),
        cwd=look,
    )
    assert done.returncode == 0, done.stderr
    output = look / "runs/x/x.out"
    wait_until(lambda: '"ended"' in (look / "runs/x/jobs.jsonl").read_text())
    check_seen(output.read_text(), look)


def findings(done) -> dict[str, dict[str, str]]:
    return {found["topic"]: found for found in json.loads(done.stdout)["findings"]}


def test_doctor_finds_an_image_in_order(image, tmp_path):
    done = run(*hpc_train("doctor", "--json", *image.options("--userns")), cwd=tmp_path)
    found = findings(done)
    found.pop("variables", None)  # if these tests run with a PYTHONPATH
    assert done.returncode == 0, done.stdout
    assert {one["status"] for one in found.values()} == {"ok"}
    assert found["tool"]["text"].startswith("apptainer version")
    assert f"{VENV}/bin/python3" in found["hpc_train"]["text"]
    assert "libmpi.so" in found["MPI"]["text"]
    assert "8 MiB passed each way" in found["two ranks"]["text"]


def test_ranks_that_are_alone_end_with_one_line_each(image, look):
    done = launch(image, "python3", "look.py", more=("--cleanenv",), cwd=look)
    assert done.returncode != 0
    assert not seen(done.stdout)
    assert "this is one of 2 ranks, and its container hides the launcher's variables" in done.stderr
    done = run(*hpc_train("doctor", "--json", *image.options("--cleanenv")), cwd=look)
    assert done.returncode == 1
    assert "this is one of 2 ranks" in findings(done)["two ranks"]["text"]


def test_an_image_without_the_package(image, tmp_path):
    (tmp_path / "my.yaml").write_text("run: {dir: run}\n")
    bare = image.without(SOURCE)
    done = launch(bare, "train", "my.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert only_line(done.stderr).startswith("hpc_train is not in the image")
    assert not (tmp_path / "run").exists()
    done = run(*hpc_train("doctor", "--json", *bare.options()), cwd=tmp_path)
    assert findings(done)["hpc_train"]["status"] == "error"
    assert "two ranks" not in findings(done)


def test_a_program_that_the_image_lacks(image, tmp_path):
    done = launch(image, "nosuch", cwd=tmp_path)
    assert done.returncode == 1
    assert "the container does not start" in only_line(done.stderr)
    assert '"nosuch": executable file not found' in only_line(done.stderr)
