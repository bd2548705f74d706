"""Ranks that a fork server makes are the processes that a cold start would have made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hpc_train.warm import key, meeting
from tests import programs
from tests.programs import COLD, hpc_train, python
from tests.waiting import PATIENCE, wait_until

ENVIRON = programs.ENVIRON | programs.own_server("alone")

# All that a program can see of how it was started.
TELL = """
import json, os, resource, signal, stat, sys, threading
SET = ("HPC_TRAIN_WARM", "OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_shmem", "_")
streams = [sys.stdin, sys.stdout, sys.stderr]
try:
    policy = open("/proc/self/numa_maps").readline().split()[1]
except OSError:
    policy = None
print(json.dumps({
    "argv": sys.argv, "first": sys.path[0], "name": __name__, "file": __file__,
    "globals": sorted(globals()), "builtins": str(__builtins__),
    "loader": type(__loader__).__name__,
    "code": sys._getframe().f_code.co_filename, "zone": __import__("time").tzname,
    "scheduling": os.sched_getscheduler(0), "policy": policy,
    "main": sys.modules["__main__"].__dict__ is globals(), "executable": sys.executable,
    "environ": {n: v for n, v in os.environ.items() if n not in SET},
    "cwd": os.getcwd(), "umask": os.umask(0o77), "nice": os.nice(0),
    "affinity": sorted(os.sched_getaffinity(0)),
    "limits": [
        resource.getrlimit(getattr(resource, n)) for n in sorted(dir(resource)) if "RLIMIT" in n
    ],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode)
                for s in streams if s],
    "kinds": [stat.S_IFMT(os.fstat(n).st_mode) for n in range(3)],
    "open": sorted(n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")
                   and not os.readlink(f"/proc/self/fd/{n}").startswith(("/proc", "anon"))),
    "threads": threading.active_count(), "torch": __import__("torch").get_num_threads(),
    "given": os.read(7, 5).decode() if os.path.exists("/proc/self/fd/7") else "",
    "input": sys.stdin.read(),
}))
"""


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def run(*words: str, environ: dict[str, str] | None = None, **how):
    return programs.run(*words, environ=ENVIRON | (environ or {}), **how)


def warmed(*program: str, environ: dict[str, str] | None = None, **how):
    """A finished program that a fork ran; it fails if it started cold."""
    done = run(*python(*program), environ={key.WHY: "1", **(environ or {})}, **how)
    assert "starts cold" not in done.stderr, done.stderr
    return done


@contextmanager
def at_work(*words, environ=None):
    """A program that has printed its first line, which is its process's number."""
    with subprocess.Popen(
        words,
        env=ENVIRON | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, psutil.Process(int(process.stdout.readline()))
        finally:
            process.kill()


def ended(process: psutil.Process) -> bool:
    psutil.wait_procs([process], 10)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "start", ["script", pytest.param("relative", marks=pytest.mark.long), "module"]
)
def test_a_program_sees_what_it_would_see_if_started_cold(tmp_path, start):
    path = script(tmp_path, TELL)
    (tmp_path / "below").mkdir()
    program = {
        "script": [path],
        "relative": ["./below/../program.py"],
        "module": ["-m", "program"],
    }[start]
    limit = "ulimit -S -n 512; umask 027; trap '' HUP; exec 3<. 4<. 5<. 6<. 8<. 9<. 7< "
    (tmp_path / "given").write_text("seven")
    seen = {}
    for warm in (True, False):
        words = " ".join(map(repr, python(*program, "one", "two words", warm=warm)))
        shell = f"{limit}{tmp_path}/given; exec nice -n 3 taskset -c 0 {words}"
        done = subprocess.run(
            ["bash", "-c", shell],
            env=ENVIRON | {key.WHY: "1", "OF_MY_OWN": "ä", "TZ": "Asia/Kathmandu"},
            cwd=tmp_path,
            input="typed",
            capture_output=True,
            text=True,
            check=False,
        )
        assert "starts cold" not in done.stderr
        seen[warm] = json.loads(done.stdout)
    assert seen[True] == seen[False]
    assert seen[True]["given"] == "seven"
    assert seen[True]["argv"][1:] == ["one", "two words"]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(75)", 75),
        ("sys.exit('a message')", 1),
        ("raise ValueError('a mistake')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.abort()", -signal.SIGABRT),
        ("os._exit(3)", 3),
    ],
)
def test_it_ends_as_the_program_ends(tmp_path, end, code):
    path = script(
        tmp_path, f"import os, signal, sys\nfile = open('left', 'w')\nfile.write('x')\n{end}"
    )
    warm, cold = (run(*python(path, warm=way), cwd=tmp_path) for way in (True, False))
    assert warm.returncode == cold.returncode == code
    assert (warm.stdout, warm.stderr) == (cold.stdout, cold.stderr)
    if code in (0, 75, 1):
        assert (tmp_path / "left").read_text() == "x", "a file that was never closed is written"


def test_signals_reach_the_program(tmp_path):
    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH]
    numbers += [signal.SIGRTMIN + 1, signal.SIGTERM]
    # By os.write: a signal that comes inside of `print` must not print as well.
    tell = "os.write(1, b'heard %d\\n' % n)"
    hear = f"signal.signal(n, lambda n, f: ({tell}, n == 15 and sys.exit(7)))"
    path = script(
        tmp_path,
        f"import os, signal, sys\nfor n in {[*map(int, numbers)]}: {hear}\n"
        "os.write(1, b'%d\\n' % os.getpid())\nwhile True: signal.pause()",
    )
    with at_work(*python(path)) as (process, _):
        for number in numbers:
            process.send_signal(number)
            line = process.stdout.readline()
            assert line == f"heard {int(number)}\n", process.communicate()
        assert process.wait(PATIENCE) == 7


SLEEP = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)"


def test_a_rank_ends_with_its_stand_in_and_it_with_the_rank(tmp_path):
    path = script(tmp_path, SLEEP)
    with at_work(*python(path)) as (process, rank):
        assert rank.pid != process.pid
        process.kill()
        assert ended(rank)
    with at_work(*python(path)) as (process, rank):
        rank.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL


WITH_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(os.getpid(), child.pid, flush=True)
END
"""


@pytest.mark.parametrize("end", ["stand-in killed", "rank killed", "rank fails", "server killed"])
def test_what_a_rank_has_started_does_not_outlive_it(tmp_path, end):
    path = script(tmp_path, WITH_CHILD.replace("END", "input(); sys.exit(3)"))
    own = {key.WARM: f"{ENVIRON[key.WARM]}-children"} if end == "server killed" else {}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(python(path), env=ENVIRON | own, **pipes) as process:
        rank, child = (psutil.Process(int(word)) for word in process.stdout.readline().split())
        assert rank.pid != process.pid
        if end == "rank fails":
            process.stdin.write("\n")
            process.stdin.flush()
        else:
            {"stand-in killed": process, "rank killed": rank}.get(end, rank.parent()).kill()
        assert ended(rank)
        assert ended(child)


def test_all_end_with_the_server_and_the_next_start_makes_another(tmp_path):
    path = script(tmp_path, SLEEP)
    own = {key.WARM: f"{ENVIRON[key.WARM]}-own", key.LINGER: "2"}
    folder = Path(meeting.folder_of(own[key.WARM]))
    with at_work(*python(path), environ=own) as (process, rank):
        server = rank.parent()
        server.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL
        assert "fork server was killed" in process.stderr.read()
        assert ended(rank)
        assert not folder.exists(), "its stand-in removes what it cannot any more"
    done = run(*python(script(tmp_path, "print('again')")), environ=own)
    assert done.stdout == "again\n", done.stderr
    wait_until(lambda: not folder.exists())  # the server leaves nothing behind


def test_signals_to_all_processes_leave_the_server_to_its_ranks(tmp_path):
    """A scheduler may send them to a cgroup, and a user to all processes of a name."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    numbers += [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGRTMIN]
    path = script(tmp_path, "import os\nprint(os.getpid(), flush=True)\ninput()\nprint('saved')")
    own = {key.WARM: f"{ENVIRON[key.WARM]}-signals", key.LINGER: "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(python(path), env=ENVIRON | own, **pipes) as process:
        server = psutil.Process(int(process.stdout.readline())).parent()
        for number in numbers:
            server.send_signal(number)
        assert process.communicate("\n", timeout=PATIENCE)[0] == "saved\n"
        assert process.returncode == 0
    assert ended(server)


FORKS_ONCE = """
import os
fork, calls = os.fork, []
def limited():
    calls.append(1)
    if len(calls) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = limited
"""


def test_a_fork_that_fails_ends_no_other_rank(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FORKS_ONCE)
    search = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    own = {key.WARM: f"{ENVIRON[key.WARM]}-limited", key.WHY: "1", "PYTHONPATH": search}
    with at_work(*python(script(tmp_path, SLEEP)), environ=own) as (process, rank):
        (tmp_path / "other.py").write_text("print('done')")
        done = run(*python(str(tmp_path / "other.py")), environ=own)
        assert done.stdout == "done\n"
        assert "starts cold: the fork server cannot fork: Resource temporarily" in done.stderr
        assert rank.is_running()
        assert process.poll() is None


@pytest.mark.parametrize(("option", "why"), [("-O", "option -O"), ("-s", "option -s"), ("-u", "")])
def test_a_training_under_python_with_options_of_its_own_starts_cold(option, why):
    words = [sys.executable, option, "-m", "hpc_train", "train", "no-such.yaml"]
    done = run(*words, environ={key.WHY: "1"})
    assert done.returncode == 2
    assert ("starts cold: the fork server's Python does not have" in done.stderr) == bool(why)
    assert why in done.stderr


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "PYTHONHASHSEED"])
def test_another_value_of_what_libraries_read_at_load_starts_cold(tmp_path, name):
    path = script(tmp_path, f"import os\nprint(os.environ[{name!r}])")
    done = run(*python(path), environ={key.WHY: "1", name: "3"})
    assert done.stdout == "3\n"
    assert "a rank starts cold: the server differs from it in variables" in done.stderr


def test_a_module_of_the_program_s_own_is_not_replaced_by_one_that_is_loaded(tmp_path):
    (tmp_path / "tokenizers.py").write_text("mine = True")
    (tmp_path / "numpy").mkdir()  # of data, not of code
    path = script(tmp_path, "import tokenizers, numpy\nprint(tokenizers.mine, numpy.ndarray)")
    done = run(*python(path), environ={key.WHY: "1"})
    assert done.stdout == "True <class 'numpy.ndarray'>\n", done.stderr
    assert f"{tmp_path} has its own module tokenizers" in done.stderr


def test_a_safe_path_is_kept(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "mine.py").write_text("")
    path = script(tmp_path, "import sys, mine\nprint(sys.path[0])")
    own = {key.WARM: f"{ENVIRON[key.WARM]}-safe", key.LINGER: "0"}
    safe = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "below")}
    assert warmed(path, environ=own | safe).stdout == f"{tmp_path / 'below'}\n"


def test_a_server_counts_as_old_when_a_file_is_replaced_but_not_when_python_caches_it(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.py").write_text("1")
    before = key.inodes_of(str(tmp_path))
    for folder in (tmp_path, tmp_path / "inside"):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "a.pyc").write_text("1")
    assert key.inodes_of(str(tmp_path)) == before
    (tmp_path / "b.py").write_text("2")
    (tmp_path / "b.py").replace(tmp_path / "inside" / "a.py")
    assert key.inodes_of(str(tmp_path)) != before


def test_threads_that_are_bound_by_a_variable_start_cold(tmp_path):
    path = script(tmp_path, "print('runs')")
    done = run(*python(path), environ={key.WHY: "1", "OMP_PROC_BIND": "close"})
    assert done.stdout == "runs\n"
    assert "starts cold: OMP_PROC_BIND binds threads" in done.stderr


def test_a_rank_of_another_scheduling_class_starts_cold(tmp_path):
    tell = "print(os.sched_getscheduler(0) == os.SCHED_BATCH)"
    path = script(tmp_path, f"import os\n{tell}")
    warmed(path)  # so that there is a server, of the usual class
    done = run("chrt", "--batch", "0", *python(path), environ={key.WHY: "1"})
    assert done.stdout == "True\n"
    assert "starts cold: the server differs from it in scheduling" in done.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 100, "HPC_TRAIN_WARM is too long"),
        ("a/b", "HPC_TRAIN_WARM is a/b, which is a path: give a name"),
        ("..", "HPC_TRAIN_WARM is .., which is a path: give a name"),
    ],
    ids=["long", "path", "dots"],
)
def test_a_name_of_no_folder_starts_cold_and_leaves_none(tmp_path, name, why):
    path = script(tmp_path, "print('runs')")
    done = run(*python(path), environ={key.WHY: "1", key.WARM: name})
    assert done.stdout == "runs\n"
    assert why in done.stderr
    assert not Path(meeting.folder_of(name), "key").exists()


def test_ranks_below_shells_of_their_own_share_a_server(tmp_path):
    path = script(tmp_path, "import os\nprint(os.getppid())")
    without = {name: value for name, value in ENVIRON.items() if "WARM" not in name}
    shell = f"{' '.join(python(path))}; exit $?"
    words = ["mpirun", "-np", "2", "sh", "-c", shell]
    done = subprocess.run(words, env=without, capture_output=True, text=True, check=True)
    one, other = done.stdout.split()
    assert one == other


def test_a_program_that_is_not_there_is_told_as_python_tells_it(tmp_path):
    path = str(tmp_path / "not.py")
    warm, cold = (run(*python(path, warm=way)) for way in (True, False))
    assert (warm.returncode, warm.stderr) == (cold.returncode, cold.stderr)


def test_a_start_can_be_ended_while_its_server_does_not_answer(tmp_path):
    own = {key.WARM: f"{ENVIRON[key.WARM]}-stopped", key.LINGER: "5"}
    path = script(tmp_path, "import os\nprint(os.getppid())")
    server = psutil.Process(int(run(*python(path), environ=own).stdout))
    server.suspend()
    try:
        with subprocess.Popen(python(path), env=ENVIRON | own) as process:
            time.sleep(0.5)
            process.terminate()
            assert process.wait(PATIENCE) == -signal.SIGTERM
    finally:
        server.kill()


@pytest.fixture
def cgroup():
    """A control group of this test's own, by version 1 or 2."""
    for root in ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup"):
        folder = Path(root, f"hpc-train-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / "cgroup.procs").exists():
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group can be made here: that needs root")


def test_a_rank_of_another_cgroup_starts_cold(tmp_path, cgroup):
    """A scheduler counts, limits and ends the processes of a job's own control group."""
    path = script(tmp_path, "print(open('/proc/self/cgroup').read())")
    warmed(path)  # so that there is a server, of the other group
    words = " ".join(python(path))
    enter = f"echo $$ > {cgroup}/cgroup.procs; exec {words}"
    done = run("sh", "-c", enter, environ={key.WHY: "1"})
    assert cgroup.name in done.stdout
    assert "starts cold: the server differs from it in cgroup" in done.stderr


def test_a_folder_that_others_can_enter_is_not_used(tmp_path):
    name = f"{ENVIRON[key.WARM]}-open"
    folder = Path(meeting.folder_of(name))
    folder.mkdir(parents=True, mode=0o700)
    folder.chmod(0o777)
    (folder / "file").touch()  # an empty folder is taken for one that its maker has left
    try:
        done = run(
            *python(script(tmp_path, "print('runs')")),
            environ={key.WHY: "1", key.WARM: name},
        )
    finally:
        (folder / "file").unlink()
        folder.rmdir()
    assert done.stdout == "runs\n"
    assert "is open to others" in done.stderr


def test_forks_draw_different_numbers(tmp_path):
    draw = "random.random(), numpy.random.rand(), torch.rand(1).item(), os.getppid()"
    path = script(tmp_path, f"import os, numpy, random, torch\nprint({draw})")
    (*one, server), (*other, same) = (warmed(path).stdout.split() for _ in range(2))
    assert server == same
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_ps_shows_the_rank_s_own_command(tmp_path):
    path = script(tmp_path, SLEEP)
    with at_work(*python(path, "--of", "mine")) as (_, rank):
        assert " ".join(rank.cmdline()) == f"{sys.executable} {path} --of mine"


def test_ranks_of_a_node_are_forked_under_any_launcher(program):
    """No server is named: the first rank of a node starts it."""
    environ = {key.WHY: "1"}
    without = {name: value for name, value in ENVIRON.items() if "WARM" not in name}
    endless = ("--run.steps", "1000000", "--checkpoint.every", "0")
    command = program.command("run", *endless, launcher="mpirun", ranks=2)
    words = ["mpirun", "-np", "2", sys.executable, *command[command.index("-m") :]]
    with subprocess.Popen(
        words, env=without | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            for line in process.stdout:
                assert "starts cold" not in line
                if "step 5 " in line:
                    break
            stand_ins = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGUSR1)
            assert process.wait(PATIENCE) == 75
        finally:
            process.kill()
    assert len(stand_ins) == 2
    assert all(ended(one) for one in stand_ins)


def test_cold_is_cold(program):
    done = run(*program.command("run", "--run.steps", "1", "--cold"), environ=COLD)
    assert done.returncode == 0, done.stderr
    done = run(*hpc_train("launch", "-np", "2", "--cold", "--dry_run", "--", "topology"))
    assert "stand_in" not in done.stdout
    own = ("launch", "-np", "2", "--dry_run", "--", "train", str(program.config), "--cold")
    assert "HPC_TRAIN_WARM=off" in run(*hpc_train(*own)).stdout
    assert "HPC_TRAIN_WARM=off" in done.stdout
