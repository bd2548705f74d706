"""Machine descriptions: what they say, and what is said of wrong ones."""

from __future__ import annotations

import pytest

from hpc_train.errors import UserError
from hpc_train.planning.machine import Compute, Link, Machine, load_machine

WHOLE = Machine(
    {"float32": Compute(3e10, 5.5e10, None, 1e-3), "bfloat16": Compute(6e10)},
    8e9,
    Link(2e-6, 2.5e-10, 2.5e-10),
    None,
    node_gib=22.5,
    ranks_per_node=2,
)


def written(tmp_path, text):
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    return path


def test_what_is_written_is_read(tmp_path):
    assert load_machine(written(tmp_path, WHOLE.to_yaml())) == WHOLE


def test_the_least_that_a_description_has(tmp_path):
    text = "compute: {float32: {rank: 1e10}}\nmemory_bandwidth: 1e9\n"
    assert load_machine(written(tmp_path, text)) == Machine({"float32": Compute(1e10)}, 1e9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the key compute is missing"),
        ("- 1", "is not a machine description"),
        ("a: b: c", "mapping values are not allowed"),
        ("memory_bandwidth: 1", "the key compute is missing"),
        ("compute: {}\nmemory_bandwidth: 1", "compute has no number format"),
        (
            "compute: {float32: 3}\nmemory_bandwidth: 1",
            "compute.float32 is 3: write its keys below it, such as rank:",
        ),
        (
            "compute: {float32: {node: 3}}\nmemory_bandwidth: 1",
            "the key compute.float32.rank is missing",
        ),
        (
            "compute: {float32: {rank: 0}}\nmemory_bandwidth: 1",
            "compute.float32.rank is 0: give a number",
        ),
        ("compute: {float32: {rank: x}}\nmemory_bandwidth: 1", "float32.rank is 'x'"),
        ("compute: {float32: {rank: null}}\nmemory_bandwidth: 1", "float32.rank is None"),
        (
            "compute: {float32: {rank: 1}}\nmemory_bandwith: 1",
            "unknown key memory_bandwith: did you mean memory_bandwidth?",
        ),
        (
            "compute: {float32: {rank: 1, nod: 2}}\nmemory_bandwidth: 1",
            "unknown key compute.float32.nod: did you mean compute.float32.node?",
        ),
        (
            "compute: {float32: {rank: 1}}\nmemory_bandwidth: 1\ninside: {alpha: -1, beta: 0}",
            "inside.alpha is -1: give a number 0 or more",
        ),
        (
            "compute: {float32: {rank: 1}}\nmemory_bandwidth: 1\ndevice: tpu",
            "device is 'tpu': it is one of cpu, cuda, xpu",
        ),
    ],
)
def test_mistakes_name_their_key(tmp_path, text, says):
    with pytest.raises(UserError) as caught:
        load_machine(written(tmp_path, text))
    assert "machine.yaml" in str(caught.value)
    assert says in str(caught.value)


def test_a_folder_is_no_description(tmp_path):
    with pytest.raises(UserError, match="give the path of a machine description"):
        load_machine(tmp_path)
