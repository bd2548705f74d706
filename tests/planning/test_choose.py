"""`hpc-train plan --nodes`: the layouts of a job, what is predicted of them, and the verb."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpc_train.cli.plan import show_layouts
from hpc_train.config.file import load
from hpc_train.data.loader import cut
from hpc_train.errors import UserError
from hpc_train.mpi.placement import place
from hpc_train.mpi.topology import Topology
from hpc_train.planning.choose import choose
from hpc_train.planning.layouts import (
    Candidate,
    LeftOut,
    Options,
    layouts,
    node_of_ranks,
    sizes,
    why_too_large,
)
from hpc_train.planning.machine import Compute, Link, Machine
from hpc_train.planning.model import division_of, planned_shape
from hpc_train.planning.predict import NO_COST, StepModel, predict, summing
from hpc_train.planning.schedules import micro_batching, sizes_that_divide
from tests.cluster.test_traffic import crossing, sent_in_a_step
from tests.programs import hpc_train as command
from tests.programs import modules_of, only_line, run

MODEL = "--model.layers=6 --model.hidden=64 --model.heads=4 --model.sequence=32 --model.vocab=256"
CONFIG = load(None, [*MODEL.split(), "--data.batch=32"])
SHAPE = planned_shape(CONFIG)
MACHINE = Machine(
    {"float32": Compute(3e10, 5e10, 2e10, 1e-4)},
    8e9,
    Link(2e-6, 2.5e-10, 2.5e-10),
    Link(5e-5, 1e-8, 4e-9),
)
SHARED = (4, 2)  # nodes, ranks of each
JOBS = st.tuples(st.integers(1, 4), st.integers(1, 4))
YAML = """
compute: {float32: {rank: 3e10, node: 5e10, layer: 1e-4}}
memory_bandwidth: 8e9
inside: {alpha: 2e-6, beta: 2.5e-10}
across: {alpha: 5e-5, beta: 1e-8}
node_gib: 1
"""


def found(config, job):
    """All layouts of a job, in a fixed order."""
    every = layouts(config, planned_shape(config), *job, Options((0, 1)))
    return [layout for layout in every if isinstance(layout, Candidate)]


EVERY = {job: found(CONFIG, job) for job in ((1, 1), (1, 4), (2, 2), (4, 2), (2, 3), (3, 4))}
ONE = st.sampled_from([layout for several in EVERY.values() for layout in several])


def one_of(config, job, **wanted):
    """The first layout with these values in its section parallel."""
    for layout in found(config, job):
        if all(getattr(layout.config.parallel, key) == value for key, value in wanted.items()):
            return layout
    raise AssertionError(wanted)


@given(JOBS)
@settings(max_examples=20)
def test_every_layout_takes_all_ranks_and_is_one_that_the_package_accepts(job):
    ranks = math.prod(job)
    seen = set()
    for layout in layouts(CONFIG, SHAPE, *job, Options((0, 1))):
        if isinstance(layout, LeftOut):
            seen.add((layout.dp, layout.tp, layout.pp))
            assert layout.why
            continue
        seen.add(layout.sizes)
        section, (dp, tp, pp) = layout.config.parallel, layout.sizes
        assert (section.dp, section.tp, section.pp) == (dp, tp, pp)
        assert dp * tp * pp == layout.node.size == ranks
        SHAPE.check(division_of(section))
        assert len(cut(CONFIG.data.batch, dp, 0, layout.config.data.micro_batch)) > 0
    assert seen == set(sizes(ranks))


@given(st.integers(1, 40))
def test_sizes_are_all_that_multiply_to_the_ranks(ranks):
    every = range(1, ranks + 1)
    expected = {each for each in product(every, every, every) if math.prod(each) == ranks}
    assert set(sizes(ranks)) == expected
    assert len(sizes(ranks)) == len(expected)


def test_ranks_lie_where_the_package_places_them():
    """Two ranks on each node: tensor-parallel groups of two share one, pipelines pass on."""
    assert node_of_ranks(4, 2, 2, 2, 2).tolist() == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    assert node_of_ranks(4, 2, 1, 1, 8).ravel().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert node_of_ranks(2, 3, 3, 2, 1)[:, 0].tolist() == [[0, 0], [0, 1], [1, 1]]


def test_a_micro_batch_that_is_given_stays():
    given_ = load(None, [*MODEL.split(), "--data.batch=32", "--data.micro_batch=2"])
    assert {micro_batching(layout.config)[0] for layout in found(given_, SHARED)} == {2}
    assert sizes_that_divide(12) == [1, 2, 4, 12]


def test_zero_is_tried_where_replicas_divide_something():
    for layout in EVERY[SHARED]:
        assert layout.config.memory.zero in ((0, 1) if len(layout.node) > 1 else (0,))
    zero = {layout.sizes for layout in EVERY[SHARED] if layout.config.memory.zero}
    assert {(8, 1, 1), (4, 2, 1)} <= zero
    inside = load(None, [*MODEL.split(), "--memory.scope=node"])
    assert {layout.sizes for layout in found(inside, SHARED) if layout.config.memory.zero} == {
        (8, 1, 1)
    }
    flat = load(None, [*MODEL.split(), "--gradients.engine=horovod"])
    assert not any(layout.config.memory.zero for layout in found(flat, SHARED))
    assert not any(
        layout.config.memory.zero
        for layout in layouts(CONFIG, SHAPE, *SHARED, Options())
        if isinstance(layout, Candidate)
    )


def test_memory_scope_says_who_divides_the_optimizers_state():
    """8 replicas on 4 nodes. Each rank has its gradients, half of the parameters, and its part."""
    asked = "--gradients.engine=mpi --memory.scope="
    of = {}
    for scope in ("node", "all"):
        given_ = load(None, [*MODEL.split(), "--data.batch=32", *f"{asked}{scope}".split()])
        of[scope] = next(
            layout
            for layout in found(given_, SHARED)
            if layout.sizes == (8, 1, 1) and layout.config.memory.zero
        )
    weights = 4 * sum(part.parameters for part in of["all"].parts)
    saved = 2 * weights * (1 / 2 - 1 / 8)  # of Adam's two moments
    assert of["node"].memory[0] - of["all"].memory[0] == pytest.approx(saved, abs=2)


FASTER = st.sampled_from(["inside", "across", "compute", "memory"])


@given(ONE, FASTER, st.floats(1, 100), st.floats(0, 1))
def test_a_faster_machine_is_never_predicted_slower(layout, part, factor, processor):
    before = replace(MACHINE, across=replace(MACHINE.across, processor=processor * 1e-8))
    faster = Compute(3e10 * factor, 5e10 * factor, 2e10 * factor, 1e-4)
    changed = {
        "inside": {"inside": Link(2e-6 / factor, 2.5e-10 / factor, 2.5e-10 / factor)},
        "across": {"across": replace(before.across, beta=1e-8 / factor)},
        "compute": {"compute": {"float32": faster}},
        "memory": {"memory_bandwidth": before.memory_bandwidth * factor},
    }[part]
    after = replace(before, **changed)
    slow, fast = StepModel(layout, before).seconds(), StepModel(layout, after).seconds()
    assert fast <= slow * (1 + 1e-12)


@given(ONE)
def test_the_parts_of_a_step_are_shares(layout):
    made = predict(layout, MACHINE)
    assert 0 <= made.bubble < 1
    assert 0 <= made.communication < 1
    assert made.bubble + made.communication <= 1


@given(ONE)
def test_memory_grows_with_the_micro_batch(layout):
    config = layout.config
    half = config.data.micro_batch // 2
    assume(half and config.parallel.schedule != "gpipe")  # which holds all of them
    smaller = replace(config, data=replace(config.data, micro_batch=half))
    assume(config.data.batch % (config.parallel.dp * half) == 0)
    assume(micro_batching(config)[1] >= config.parallel.pp)  # else fewer are live
    assert Candidate(smaller, SHAPE, layout.node).memory < layout.memory


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_replicas_alone_on_an_ideal_network_take_the_time_of_computing(micro_batch):
    ideal = Machine({"float32": Compute(1e10)}, math.inf, NO_COST, NO_COST)
    size = [*MODEL.split(), "--data.batch=32", f"--data.micro_batch={micro_batch}"]
    layout = one_of(load(None, size), SHARED, dp=8)
    computing = 3 * 4 * sum(part.flops for part in SHAPE.parts()) / 1e10
    made = predict(layout, ideal)
    assert made.seconds == pytest.approx(computing)
    assert made.bubble == pytest.approx(0)
    assert made.communication == 0


def test_a_sum_moves_twice_what_all_but_one_have():
    slow, none = Link(1.0, 1.0), Link(0.0, 0.0)
    assert summing(slow, none, 4, 1, 100) == 4 + 150
    assert summing(none, slow, 4, 4, 100) == 4 + 150
    assert summing(none, slow, 4, 2, 100) == 2 + 100, "the far half leaves the node"
    assert summing(slow, none, 4, 2, 100) == 2 + 50
    assert summing(slow, slow, 1, 1, 100) == 0


@pytest.mark.parametrize(
    "words",
    [
        "dp=8",
        "dp=4 tp=2",
        "dp=4 tp=2 sequence_parallel=true",
        "dp=4 pp=2",
        "dp=2 tp=2 pp=2",
        "dp=2 tp=2 pp=2 schedule=interleaved",
        "tp=2 pp=4 sequence_parallel=true",
        "tp=2 pp=4 schedule=interleaved",
        "pp=8",
    ],
)
def test_the_predicted_traffic_across_nodes_is_the_measured_one(words):
    """`sent_in_a_step` is compared with the emulated links' counters in tests/cluster."""
    options = [*MODEL.split(), "--precision.dtype=float64", "--data.batch=32"]
    layout_options = [f"--parallel.{word}" for word in words.split()]
    config = load(None, [*options, "--data.micro_batch=4", *layout_options])
    section = config.parallel
    hosts = tuple(f"node{n}" for n in range(4))
    topology = Topology(hosts, tuple(rank // 2 for rank in range(8)), (-1,) * 8)
    placement = place(topology, section.dp, section.tp, section.pp)
    exact = replace(config, parallel=replace(section, dp=placement.dp))
    layout = Candidate(exact, SHAPE, placement.ranks // 2)
    machine = replace(MACHINE, compute={"float64": MACHINE.compute["float32"]})
    across = StepModel(layout, machine).traffic()[1]
    by_node = np.bincount(
        layout.node.ravel(), np.broadcast_to(across, (placement.ranks.shape)).ravel()
    )
    expected = crossing(sent_in_a_step(config, placement), topology)
    assert by_node.tolist() == pytest.approx(list(expected.values()))


@pytest.mark.parametrize("sequence", ["false", "true"])
def test_tensor_groups_exchange_what_products_are_computed_in(sequence):
    def sent(dtype):
        words = f"--parallel.tp=2 --parallel.dp=1 --parallel.sequence_parallel={sequence}"
        sizes = [*MODEL.split(), "--data.batch=8", *words.split(), f"--precision.dtype={dtype}"]
        layout = Candidate(load(None, sizes), SHAPE, node_of_ranks(1, 2, 1, 2, 1))
        machine = replace(MACHINE, compute={dtype: MACHINE.compute["float32"]})
        return StepModel(layout, machine).traffic()[0].max()

    # Of the sums, the embedding's stays in 32 bits.
    every = {"false": 6 * 4 + 2, "true": 6 * 5 + 2.5}[sequence]
    assert sent("bfloat16") / sent("float32") == pytest.approx((every + 1) / 2 / every)


def test_a_flat_sum_leaves_a_node_once():
    sizes = [*MODEL.split(), "--data.batch=8", "--parallel.dp=8", "--memory.zero=0"]
    for way, share in (("auto", 1.0), ("off", 2 * 7 / 8)):
        config = load(None, [*sizes, f"--gradients.two_level={way}"])
        step = StepModel(Candidate(config, SHAPE, node_of_ranks(2, 4, 8, 1, 1)), MACHINE)
        nbytes = np.broadcast_to(step.averaged_across(), step.node.shape)
        assert nbytes[:4].sum() == nbytes[4:].sum() == pytest.approx(share * step.state.max())


def test_ranks_that_share_cores_take_their_turns():
    """Four nodes of two ranks on the cores of two: eight ranks take four times as long."""
    shared = Machine({"float32": Compute(1e10, 2e10, 0.5e10)}, math.inf, NO_COST, NO_COST)
    own = Machine({"float32": Compute(1e10)}, math.inf, NO_COST, NO_COST)
    data = one_of(CONFIG, SHARED, dp=8)
    assert predict(data, shared).seconds == pytest.approx(4 * predict(data, own).seconds)
    pipeline = one_of(CONFIG, SHARED, pp=8, schedule="1f1b")  # one micro-batch is in one stage
    waiting = replace(pipeline.config, data=replace(CONFIG.data, micro_batch=32))
    alone = Candidate(waiting, SHAPE, pipeline.node)
    assert predict(alone, shared).seconds == pytest.approx(predict(alone, own).seconds)


def test_what_a_description_does_not_have_is_named():
    with pytest.raises(UserError, match=r"has no compute\.float64: it has float32: measure"):
        choose(load(None, [*MODEL.split(), "--precision.dtype=float64"]), MACHINE, *SHARED)
    with pytest.raises(UserError, match="has no messages between nodes"):
        choose(CONFIG, replace(MACHINE, across=None), *SHARED)
    with pytest.raises(UserError, match="has no messages between ranks of a node"):
        choose(CONFIG, replace(MACHINE, inside=None), *SHARED)
    assert choose(CONFIG, replace(MACHINE, inside=None), 4, 1).layouts


def test_what_does_not_fit_is_left_out_and_said():
    small = replace(MACHINE, node_gib=0.004)
    made = choose(CONFIG, small, *SHARED, top=100)
    assert made.layouts
    assert made.left_out
    for one in made.left_out:
        assert one.why.startswith(("needs", "parallel.")), one
    chosen = {(row.dp, row.tp, row.pp) for row in made.layouts}
    assert chosen.isdisjoint({(one.dp, one.tp, one.pp) for one in made.left_out})
    assert len(chosen) + len(made.left_out) == len(sizes(8))
    for layout in EVERY[SHARED]:
        assert bool(why_too_large(layout, small)) == (layout.memory[1] > 0.004 * 2**30)
    assert why_too_large(EVERY[SHARED][0], replace(MACHINE, rank_gib=1e-6)).endswith(
        "of a rank's 1.049 KiB"
    )


def test_nothing_fits():
    with pytest.raises(UserError, match=r"none of 10 layouts of 8 ranks fits: dp .*: needs .* MiB"):
        choose(CONFIG, replace(MACHINE, node_gib=1e-5), *SHARED)
    with pytest.raises(UserError, match=r"none of 3 layouts of 11 ranks fits: .*: [a-z.]+ .*11"):
        choose(CONFIG, MACHINE, 1, 11)


def test_the_fastest_come_first_and_each_size_once(capsys):
    made = choose(CONFIG, MACHINE, *SHARED)
    times = [row.step_seconds for row in made.layouts]
    assert times == sorted(times)
    assert len({(row.dp, row.tp, row.pp) for row in made.layouts}) == len(made.layouts)
    every = choose(CONFIG, MACHINE, *SHARED, top=10**6, every=True)
    assert every.fit == len(every.layouts) == len(EVERY[SHARED])
    assert every.layouts[0] == made.layouts[0]
    show_layouts(made, as_json=False)
    text = capsys.readouterr().out
    assert f"the first: {made.layouts[0].options}\n" in text
    assert max(map(len, text.split("the first")[0].splitlines())) <= 120


@pytest.mark.parametrize(("kind", "unit"), [("gpt", "tokens/s"), ("tabular_mlp", "samples/s")])
def test_the_speed_is_told_in_tokens_of_text_or_in_samples(kind, unit, tmp_path, capsys):
    config = CONFIG
    if kind != "gpt":
        csv = tmp_path / "t.csv"
        csv.write_text("a,b,y\n" + "".join(f"{i},{i % 7},{i % 3}\n" for i in range(60)))
        prepare = ["prepare", "table", str(csv), "--target", "y", "--out", str(tmp_path / "t")]
        assert run(*command(*prepare)).returncode == 0
        words = [f"--model.kind={kind}", f"--data.path={tmp_path / 't'}", "--data.batch=32"]
        config = load(None, words)
    made = choose(config, MACHINE, 1, 2)
    show_layouts(made, as_json=False)
    assert capsys.readouterr().out.count(unit) == 2, "in the table and below it"
    for row in made.layouts:
        assert row.samples_per_second == pytest.approx(32 / row.step_seconds)
        assert row.tokens_per_second in (None, pytest.approx(32 * 32 / row.step_seconds))


def test_a_description_of_other_ranks_is_warned_of(capsys):
    assert choose(CONFIG, replace(MACHINE, ranks_per_node=2), *SHARED).warning == ""
    made = choose(CONFIG, replace(MACHINE, ranks_per_node=4), *SHARED)
    show_layouts(made, as_json=False)
    assert "warning: the machine was measured with 4 ranks on each node" in capsys.readouterr().out


@pytest.mark.parametrize(
    "others",
    [
        "",
        "--parallel.tp=2 --parallel.pp=2 --parallel.schedule=interleaved "
        "--parallel.virtual_stages=3 --parallel.sequence_parallel=true --memory.recompute=2",
    ],
)
def test_the_options_give_the_layout(others):
    words = [*MODEL.split(), "--data.batch=32", *others.split()]
    every = choose(load(None, words), MACHINE, *SHARED, top=10**6, every=True).layouts
    for row in every[::12]:
        config = load(None, [*words, *row.options.split()])
        section = config.parallel
        assert (section.dp, section.tp, section.pp) == (row.dp, row.tp, row.pp)
        assert section.sequence_parallel == row.sequence_parallel
        assert row.pp == 1 or section.schedule == row.schedule
        assert section.stages_per_rank == row.virtual_stages
        assert (config.data.micro_batch, config.memory.zero) == (row.micro_batch, row.zero)
        assert config.memory.recompute == row.recompute


@pytest.mark.parametrize("key", ["run.compile=true", "gradients.compression=topk:0.01"])
def test_sizes_that_another_key_excludes_are_left_out(key):
    config = load(None, [*MODEL.split(), "--data.batch=32", f"--{key}"])
    made = choose(config, MACHINE, 2, 2)
    assert {row.tp for row in made.layouts} == {1}
    why = {(one.dp, one.tp, one.pp): one.why for one in made.left_out}
    assert f"{key.split('.')[1].split('=')[0]} is" in why[2, 2, 1]
    assert "parallel.tp is 2" in why[2, 2, 1]


@pytest.fixture
def files(tmp_path):
    config, machine = tmp_path / "plan.yaml", tmp_path / "m.yaml"
    config.write_text(
        "model: {layers: 6, hidden: 64, heads: 4, sequence: 32, vocab: 256}\ndata: {batch: 32}\n"
    )
    machine.write_text(YAML)
    return config, machine


def planned(files, *options):
    config, machine = files
    return run(*command("plan", str(config), "--machine", str(machine), *options))


def test_the_verb_prints_a_table_or_json(files):
    text = planned(files, "--nodes", "4", "--ranks_per_node", "2")
    assert text.returncode == 0, text.stderr
    assert "the first: --parallel.dp" in text.stdout
    assert "1 x 8 x 1: parallel.tp 8 does not divide model.heads 4" in text.stdout
    printed = planned(files, "--nodes", "4", "--ranks_per_node=2", "--top", "3", "--json")
    tree = json.loads(printed.stdout)
    assert (tree["nodes"], tree["ranks_per_node"], tree["fit"]) == (4, 2, 9)
    assert len(tree["layouts"]) == 3
    assert all(row["step_seconds"] > 0 for row in tree["layouts"])
    assert all(row["options"].startswith("--parallel.dp") for row in tree["layouts"])
    assert tree["left_out"][0]["why"].startswith("parallel.tp 8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--nodes=4", "--machine=none.yaml"],
            "there is no machine description none.yaml: measure",
        ),
        (["--nodes=4", "--data.batch=0"], "data.batch is 0"),
        (["--nodes=0"], "nodes"),
        (["--nodes=4", "--rank_per_node=2"], "--rank_per_node"),
        (["--nodes=4", "--model.hidden=16384", "--model.heads=128"], "of 4 ranks fits: dp "),
    ],
)
def test_mistakes_are_one_line(files, options, message):
    done = planned(files, *options)
    assert done.returncode == 2
    assert message in only_line(done.stderr)
    assert not done.stdout


def test_planning_loads_neither_torch_nor_mpi(files):
    config, machine = files
    words = "--machine", machine, "--nodes", 2, "--ranks_per_node", 2
    code, told, modules = modules_of("plan", config, *words)
    assert (code, {"torch", "mpi4py"} & modules) == (0, set()), told


def test_memory_is_saved_only_where_nothing_fits_otherwise():
    roomy = choose(CONFIG, MACHINE, *SHARED, top=100)
    assert {row.recompute for row in roomy.layouts} == {"none"}
    least = min(layout.memory[1] for layout in EVERY[SHARED])
    small = replace(MACHINE, node_gib=0.9 * least / 2**30)
    tight = choose(CONFIG, small, *SHARED, top=100)
    assert all(row.zero > 1 or row.recompute != "none" for row in tight.layouts)
    assert "--memory." in tight.layouts[0].options


def test_gradients_of_gpus_need_memory_of_the_node_where_they_are_summed():
    parameters = 4 * sum(part.parameters for part in SHAPE.parts())
    on_gpus = replace(MACHINE, device="cuda", rank_gib=1.0)
    two = next(layout for layout in found(CONFIG, (1, 2)) if layout.sizes == (2, 1, 1))
    nccl = replace(two, config=load(None, [*MODEL.split(), "--gradients.engine=nccl"]))
    assert two.needs.hosts.tolist() == [2 * parameters]
    spread = next(layout for layout in found(nccl.config, (2, 2)) if layout.sizes == (4, 1, 1))
    assert spread.needs.hosts.tolist() == [parameters] * 2, "a half of the gradients for each rank"
    for room, layout, why in ((2.1, two, ""), (1.9, two, "of a node's"), (0, nccl, "")):
        machine = replace(on_gpus, node_gib=room * parameters / 2**30)
        assert why in why_too_large(layout, machine), room
        assert bool(why) == bool(why_too_large(layout, machine)), room


def test_with_the_optimizer_on_the_host_gpus_and_nodes_have_their_parts():
    on_gpus = replace(MACHINE, device="cuda", rank_gib=1.0, node_gib=1.0)
    staged = load(None, [*MODEL.split(), "--data.batch=32", "--memory.offload=optimizer"])
    one, plain = (choose(config, on_gpus, 1, 1).layouts[0] for config in (staged, CONFIG))
    parameters = 4 * sum(part.parameters for part in SHAPE.parts())
    assert (one.zero, plain.zero) == (1, 0), "one replica does it, too"
    assert plain.memory_bytes - one.memory_bytes == pytest.approx(2 * parameters, abs=2)
    of_node = next(layout for layout in found(staged, (1, 1))).memory[1]
    assert of_node == pytest.approx(4 * parameters, abs=2)
    small = replace(on_gpus, node_gib=0.9 * of_node / 2**30)
    with pytest.raises(UserError, match="of a node's"):
        choose(staged, small, 1, 1)
