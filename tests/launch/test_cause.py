"""Causes of failures, from what launchers print."""

from __future__ import annotations

import pytest

from hpc_train.launch.cause import explain

CASES = [
    (
        163,
        ["mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 35 (Real...)."],
        "rank 1 (vm) was ended by signal 35",
    ),
    (3, ["  Process name: [[27641,1],2]", "  Exit code:    3"], "rank 2 exited with code 3"),
    (3, ["   Process name: [prterun-vm-15698@1,1]", "   Exit code:    3"], "rank 1 exited with"),
    (1, ["ORTE has lost communication with a remote daemon."], "a host was lost"),
    (139, [], "a rank was ended by SIGSEGV; the launcher does not say which"),
    (
        137,
        [
            "mpirun noticed that process rank 3 with PID 81 on node node2 exited on signal 9 "
            "(Killed)."
        ],
        "rank 3 (node2) was ended by SIGKILL, perhaps for lack of memory",
    ),
    (
        137,
        [
            "hpc-train: the fork server was killed, and this rank with it",
            "mpirun noticed that process rank 3 with PID 81 on node node2 exited on signal 9 (K).",
        ],
        "rank 3 (node2) was ended by SIGKILL: the fork server of its node was killed",
    ),
    (
        139,
        ["mpirun noticed that process rank 0 with PID 0 on node vm exited on signal 11 (Segm...)."],
        "rank 0 (vm) was ended by SIGSEGV",
    ),
    (255, [], "the launcher exited with code 255"),
    (
        255,
        ['FATAL:   "python3": executable file not found in $PATH', "  Exit code:    255"],
        'the container does not start: "python3": executable file not found in $PATH',
    ),
    (137, ["srun: error: node2: task 3: Killed"], "rank 3 (node2) was ended by SIGKILL, perhaps"),
    (
        137,
        ["srun: error: node2: tasks 3-4: Killed", "srun: error: node1: task 0: Terminated"],
        "rank 3 (node2) was ended by SIGKILL",
    ),
    (1, ["srun: error: node2: task 3: Out Of Memory"], "rank 3 (node2) ran out of memory"),
    (1, ["srun: error: node2: task 1: Exited with exit code 1"], "rank 1 (node2) exited with code"),
    (1, ["srun: error: Node failure on node4"], "host node4 was lost"),
    (1, ["x4: rank 5 died from signal 9"], "rank 5 (x4) was ended by SIGKILL"),
    (
        9,
        [
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
            "=   PID 4242 RUNNING AT vm",
            "=   EXIT CODE: 9",
            "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
        ],
        "a rank (vm) was ended by SIGKILL",
    ),
    (
        1,
        ["hpc-train: error: rank 2 (node2) does not answer, stopped, dead or stuck: look there"],
        "rank 2 (node2) does not answer, stopped, dead or stuck: look there",
    ),
    (
        1,
        ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no", "mpirun"],
        "ValueError: no",
    ),
    (
        1,
        [
            *["Traceback (most recent call last):"] * 2,
            *['  File "x.py", line 1'] * 2,
            "ValueError: no",
        ],
        "ValueError: no",
    ),
    (
        1,
        [
            *("-" * 60, "Primary job  terminated normally, but ...", "-" * 60),
            *("-" * 60, "While computing bindings, we found no available cpus on", ""),
            *("the following node:", "", "  Node:  vm", "-" * 60),
        ],
        "While computing bindings, we found no available cpus on the following node: Node: vm",
    ),
    (
        1,
        [
            *("-" * 60, "MPI_ABORT was invoked on rank 1 in communicator X", "-" * 60),
            "rank 1 (vm) left the program by SystemExit(3), but other ranks did not",
        ],
        "rank 1 (vm) left the program by SystemExit(3)",
    ),
    (
        1,
        ["rank 1 (vm) failed:", "Traceback (most recent call last):", "  x", "ValueError: boo"],
        "rank 1 (vm) failed: ValueError: boo",
    ),
    (
        1,
        [
            *("-" * 60, "mpirun has exited due to process rank 1 with PID 0 on"),
            *("node vm exiting improperly. There are three reasons this could occur:", "-" * 60),
        ],
        "rank 1 (vm) exited without MPI_Finalize",
    ),
    (
        137,
        [
            *("rank 0 (vm) failed:", "Traceback (most recent call last):", "MPI.Exception: no"),
            "mpirun noticed that process rank 3 with PID 81 on node n2 exited on signal 9 (K).",
        ],
        "rank 3 (n2) was ended by SIGKILL",
    ),
    (-9, [], "the launcher was ended by SIGKILL"),
    (
        143,
        ["nothing that is known"],
        "a rank was ended by SIGTERM; the launcher does not say which",
    ),
    (3, [], "the launcher exited with code 3"),
]


@pytest.mark.parametrize(("code", "lines", "expected"), CASES)
def test_the_cause_is_named(code, lines, expected):
    assert explain(code, lines).startswith(expected)
