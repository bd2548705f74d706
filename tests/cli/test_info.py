"""hpc-train info collectives, as it is run: alone and under a launcher."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from argparse import ArgumentTypeError

import pytest

from hpc_train.cli.info import WORDS, show_figures, sizes_of
from hpc_train.job.communication.figures import IMPLEMENTATIONS, CollectiveFigure
from hpc_train.mpi import runtime
from tests.programs import command, hpc_train, only_line, run

FEW = ("info", "collectives", "--sizes", "8,64K", "--seconds", "600", "--repeats", "3")
COLLECTIVES = {"allreduce", "broadcast", "allgather", "reduce_scatter"}


def test_alone_it_says_how_to_start_it_and_loads_neither_mpi_nor_torch():
    check = (
        "import sys; from hpc_train.cli import main; code = main(['info', 'collectives'])\n"
        "print(code, {'torch', 'mpi4py.MPI'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"
    assert "mpirun -np 4 hpc-train info collectives" in only_line(done.stderr)


def test_two_ranks_measure_every_implementation_and_write_all_files(tmp_path):
    names = {kind: str(tmp_path / f"found.{kind}") for kind in ("json", "csv", "html")}
    files = ("--json", names["json"], "--csv", names["csv"], "--plot", names["html"])
    done = run(*command("mpirun", 2, *FEW, *files))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ranks"], found["nodes"], found["device"]) == (2, 1, "cpu")
    by = {(f["operation"], f["implementation"], f["nbytes"]): f for f in found["figures"]}
    wanted = {
        (op, who, size) for op in COLLECTIVES for who in ("bare", "mpi") for size in (8, 65536)
    }
    wanted |= {("allreduce", "shared", 65536), ("ping_pong", "pipeline", 8), ("barrier", "bare", 0)}
    if runtime.horovod_built():
        wanted.add(("allreduce", "horovod", 8))
    assert wanted <= set(by)
    gathered = by["allgather", "bare", 65536]
    assert gathered["scope"] == "inside"
    assert gathered["least"] <= gathered["low"] <= gathered["seconds"] <= gathered["high"]
    assert gathered["bus_bandwidth"] == pytest.approx(65536 / gathered["seconds"] / 2)
    rows = list(csv.DictReader((tmp_path / "found.csv").read_text().splitlines()))
    assert [float(row["seconds"]) for row in rows] == [f["seconds"] for f in found["figures"]]
    page = (tmp_path / "found.html").read_text()
    drawing = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}polyline"))) >= 2 * len(COLLECTIVES)
    assert page.count("http") == 1  # the name of SVG: nothing is fetched
    assert "allreduce, inside a node (2 ranks)" in done.stdout
    assert done.stdout.count("at a glance") == 1


def test_four_ranks_measure_what_is_asked_for_and_are_warned_of_cores_they_share():
    done = run(*command("mpirun", 4, *FEW, "--implementations", "shared,bare", "--device", "cpu"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shared" in done.stdout
    assert "mpi" not in done.stdout.partition("at a glance")[0].partition("allreduce")[2]
    if len(os.sched_getaffinity(0)) < 4:
        assert "warning: ranks take turns on too few cores" in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sizes", "8,10"], "'10' is no multiple of 4 bytes"),
        (["--seconds", "0"], "'0' is not a number of seconds above 0"),
        (["--implementations", "gloo"], "'gloo' is none of bare, mpi,"),
        (["--plot", "here.pdf"], "'here.pdf' ends with none of .html, .svg"),
    ],
)
def test_a_wrong_option_is_one_line_and_code_2(options, says):
    done = run(*hpc_train(*FEW, *options))
    assert done.returncode == 2
    assert says in only_line(done.stderr)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--implementations", "bare,ring"], "ring has nothing to do on these ranks"),
        (["--json", "no/such/folder/x.json"], "no/such/folder/x.json cannot be written"),
    ],
)
def test_what_does_not_fit_these_ranks_is_one_line_and_code_2(options, says):
    done = run(*command("mpirun", 2, *FEW, *options))
    assert done.returncode == 2
    assert says in only_line(done.stderr)


def test_sizes_are_bytes_in_powers_of_1024():
    assert sizes_of("1M,8,4K, 64KiB") == (8, 4096, 65536, 1 << 20)
    with pytest.raises(ArgumentTypeError, match="'4 kg' is no size"):
        sizes_of("8,4 kg")
    with pytest.raises(ArgumentTypeError, match="'8G' is more than 4G"):
        sizes_of("8G")


def test_the_help_knows_every_implementation():
    assert set(WORDS) == set(IMPLEMENTATIONS)
    text = run(*hpc_train("info", "collectives", "--help")).stdout
    assert all(word in text for word in WORDS)


def test_the_last_table_names_the_fastest_at_the_largest_size_that_all_have(capsys):
    def took(who, nbytes, seconds):
        return CollectiveFigure(
            "all", "allreduce", who, 4, nbytes, seconds, seconds, seconds, seconds, 3
        )

    show_figures(
        [
            took("bare", 8, 2e-6),
            took("bare", 4096, 4e-5),
            took("ring", 8, 5e-5),
            took("ring", 4096, 1e-5),
            took("bare", 1 << 20, 1.8e-2),
        ]
    )
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "size bare GB/s ring GB/s" in lines
    assert "4 KiB 40 us (0%) 0.154 10 us (0%) 0.614" in lines
    assert "1 MiB 18 ms (0%) 0.0874 - -" in lines
    assert "allreduce all 2 us 4 KiB ring 0.614 4.00" in lines
