"""What other programs print."""

from __future__ import annotations

from hpc_train.host.programs import output


def test_a_program_may_print_bytes_that_are_no_text():
    assert (
        output("printf", r"mpirun \351 4.1", timeout=60) == "mpirun \N{REPLACEMENT CHARACTER} 4.1"
    )
