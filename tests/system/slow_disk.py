"""Jobs whose first save takes longer than anybody could expect, under a time limit.

    python -m tests.system.slow_disk --cases 10 --limit 25

Each job trains with its checkpoints far apart, on a disk that takes a random time for each of them.
It has to end before its limit, with exit code 75 and a checkpoint of its last step.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from random import Random

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from tests.conftest import small_program, small_text
from tests.programs import COLD, python, run

SCRIPT = """
import sys
import time

import psutil

from hpc_train import files
from hpc_train.cli import main

original, seconds = files.call, float(sys.argv.pop(1))


def slow(name, function, *arguments):
    if name == "reserve":
        time.sleep(seconds)
    return original(name, function, *arguments)


files.call = slow
code = main()
print(f"a rank has lived {time.time() - psutil.Process().create_time():.2f} s", flush=True)
sys.exit(code)
"""


def case(folder: Path, data: Path, random: Random, limit: int) -> str:
    """One job; returns what it did."""
    program, script = small_program(folder, data), folder / "slow.py"
    script.write_text(SCRIPT)
    ranks, save = random.choice([1, 2]), random.uniform(0.02, 0.25) * limit
    words = python(str(script), str(save), "train", str(program.config), warm=False)
    words += ["--run.dir", str(folder / "run"), "--run.steps", "1000000"]
    words += ["--checkpoint.every", "1000000", "--run.time_limit", str(limit)]
    words += ["--checkpoint.background", random.choice(["true", "false"])]
    done = run(*(["mpirun", "-np", str(ranks)] if ranks > 1 else []), *words, environ=COLD)
    assert done.returncode == 75, done.stderr
    stopped = re.search(
        r"stopped by time_limit \(\d+ s\) after step (\d+), checkpoint", done.stdout
    )
    assert stopped, done.stdout[-1000:]
    assert int(stopped[1]) == step_of(find_checkpoints(folder / "run" / "checkpoints", "auto")[0])
    seconds = max(map(float, re.findall(r"a rank has lived ([\d.]+) s", done.stdout)))
    assert seconds < limit, seconds
    return f"{ranks} ranks, saves of {save:.1f} s: ended after {seconds:.1f} of {limit} s"


def main() -> None:
    """Try and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--limit", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        data = small_text(Path(name) / "data")
        for number in range(options.cases):
            folder = Path(name) / str(number)
            folder.mkdir()
            print(case(folder, data, Random(number), options.limit), flush=True)
    print(f"{options.cases} of {options.cases} ended before their limit with a checkpoint")


if __name__ == "__main__":
    main()
