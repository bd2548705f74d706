"""Layouts of eight ranks through the whole program: the same results, and any to any other."""

from __future__ import annotations

import shutil

import pytest

from tests.programs import only_line, python, run


def options(dp: int, tp: int, pp: int, *more: str) -> list[str]:
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    chosen = [word for key, size in sizes.items() for word in (f"--parallel.{key}", str(size))]
    return [*chosen, "--model.vocab", "264", *more]


@pytest.mark.slow("eight ranks and as many models as layouts")
@pytest.mark.long
def test_random_layouts_give_the_results_of_one_rank():
    count = 40
    command = python("-m", "tests.system.layouts", "--count", str(count), "--seed", "0")
    done = run("mpirun", "-np", "8", *command)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "BAD"))]
    assert done.returncode == 0, f"{lines[-1:]}\n{done.stderr}"
    assert len(lines) == count


@pytest.mark.slow("five jobs, one of them of eight ranks")
def test_a_checkpoint_of_one_layout_opens_in_any_other(program):
    steady = ["--optimizer.schedule", "constant"]  # a rate that does not know of the last step
    whole = program.train("whole", *options(1, 1, 1), *steady)
    assert whole.returncode == 0, whole.stderr
    cube = options(2, 2, 2, "--parallel.sequence_parallel", "true", "--run.steps", "5")
    done = program.train("cube", *cube, *steady, launcher="mpirun", ranks=8)
    assert done.returncode == 0, done.stderr
    for dp, tp, pp in ((2, 1, 1), (1, 1, 4), (1, 1, 1)):
        name = f"{dp}-{tp}-{pp}"
        shutil.copytree(program.root / "cube", program.root / name)
        ranks = dp * tp * pp
        done = program.train(
            name,
            *options(dp, tp, pp),
            *steady,
            launcher="mpirun" if ranks > 1 else "alone",
            ranks=ranks,
        )
        assert done.returncode == 0, done.stderr
        assert "resumed from" in done.stdout
        assert program.losses(name) == pytest.approx(program.losses("whole"), rel=1e-10)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["--parallel.tp", "3"], "parallel.tp 3 does not divide model.heads 2"),
        (["--parallel.tp", "2", "--model.vocab", "301"], "model.vocab 302"),
        (["--parallel.pp", "5"], "parallel.pp 5 is more than the 4 parts of the model"),
        (["--parallel.pp", "2", "--parallel.dp", "2"], "nearest that fit"),
        (["--parallel.virtual_stages", "2"], "use --parallel.schedule interleaved"),
        (["--parallel.sequence_parallel", "true"], "parallel.tp is 1"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(program, chosen, message):
    done = program.train("run", *chosen)
    assert done.returncode == 2
    assert message in only_line(done.stderr)
