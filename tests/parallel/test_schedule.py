from __future__ import annotations

from itertools import chain
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpc_train.parallel.schedule import (
    Action,
    Kind,
    Name,
    build,
    forward_only,
    peak_live_formula,
)
from hpc_train.parallel.simulate import (
    Costs,
    ScheduleError,
    bubble_formula,
    enough,
    makespan,
    peak_live,
    simulate,
)

NAMES = get_args(Name)
STAGES, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 12)
SIZES = [
    (name, stages, micro_batches, virtual_stages)
    for name in NAMES
    for stages in range(1, 9)
    for micro_batches in range(1, 13)
    for virtual_stages in ((1, 2, 3) if name == "interleaved" else (1,))
]
TRAINING = st.sampled_from(SIZES)
COST = st.integers(1, 6)


def test_small_schedules_have_the_memory_and_bubble_of_the_formulas():
    for name, stages, micro_batches, virtual_stages in SIZES:
        timing = simulate(build(name, stages, micro_batches, virtual_stages), virtual_stages)
        promised = peak_live_formula(name, stages, micro_batches, virtual_stages)
        assert timing.peak_live == promised, (name, stages, micro_batches, virtual_stages)
        bubble = bubble_formula(name, stages, micro_batches, virtual_stages)
        assert timing.bubble == pytest.approx(bubble), (name, stages, micro_batches, virtual_stages)


@given(TRAINING)
def test_each_micro_batch_passes_each_chunk_once_and_backward_in_order(size):
    name, _, micro_batches, virtual_stages = size
    split = name == "zero_bubble"
    after = (Kind.INPUT, Kind.WEIGHT) if split else (Kind.BACKWARD,)
    for actions in build(*size):
        for virtual_stage in range(virtual_stages):
            for kind in (Kind.FORWARD, *after):
                mine = [
                    a.micro_batch
                    for a in actions
                    if (a.kind, a.virtual_stage) == (kind, virtual_stage)
                ]
                assert mine == list(range(micro_batches))
        assert len(actions) == micro_batches * virtual_stages * (1 + len(after))


@given(STAGES, MICRO_BATCHES)
def test_the_published_bubbles_and_limits(p, n):
    def bubble(name, virtual_stages=1):
        return simulate(build(name, p, n, virtual_stages), virtual_stages).bubble

    assert bubble("gpipe") == bubble("1f1b") == pytest.approx((p - 1) / (n + p - 1))
    assert peak_live_formula("gpipe", p, n) == (n,) * p
    assert peak_live_formula("1f1b", p, n) == tuple(min(n, p - rank) for rank in range(p))
    assert max(peak_live_formula("zero_bubble", p, n)) == max(peak_live_formula("1f1b", p, n))
    if n >= p:
        assert bubble("interleaved", 2) == pytest.approx((p - 1) / (2 * n + p - 1))
        assert bubble("zero_bubble") == pytest.approx((p - 1) / (3 * n + p - 1))
    if p > 1:
        assert bubble("zero_bubble") < bubble("1f1b")


@given(STAGES, st.integers(1, 3), st.integers(2, 4))
def test_interleaved_holds_what_megatron_does(p, groups, virtual_stages):
    n = groups * p
    warm_ups = [2 * (p - rank - 1) + (virtual_stages - 1) * p for rank in range(p)]
    expected = tuple(min(n * virtual_stages, warm_up + 1) for warm_up in warm_ups)
    assert peak_live_formula("interleaved", p, n, virtual_stages) == expected


@given(TRAINING, COST, COST, COST)
def test_the_formulas_hold_for_other_costs(size, forward, input_, weight):
    costs = Costs(forward, input_, min(weight, forward, input_))
    timing = simulate(build(*size), size[3], costs)
    assert timing.bubble == pytest.approx(bubble_formula(*size, costs))


def test_one_forward_one_backward_written_out():
    words = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "I", Kind.WEIGHT: "W"}

    def text(name, virtual_stages=1):
        lists = build(name, 2, 3 if virtual_stages == 1 else 2, virtual_stages)
        made = [
            [words[a.kind] + f"{a.micro_batch}{'ab'[a.virtual_stage]}" for a in rank]
            for rank in lists
        ]
        return [" ".join(rank) for rank in made]

    assert text("gpipe") == ["F0a F1a F2a B0a B1a B2a"] * 2
    assert text("1f1b") == ["F0a F1a B0a F2a B1a B2a", "F0a B0a F1a B1a F2a B2a"]
    assert text("zero_bubble") == [
        "F0a F1a I0a W0a F2a I1a W1a I2a W2a",
        "F0a I0a F1a I1a W0a F2a I2a W1a W2a",
    ]
    assert text("interleaved", 2) == [
        "F0a F1a F0b F1b B0b B1b B0a B1a",
        "F0a F1a F0b B0b F1b B1b B0a B1a",
    ]


def test_pipelines_of_sixty_four_ranks():
    for name, virtual_stages in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        timing = simulate(build(name, 64, 256, virtual_stages), virtual_stages)
        assert timing.bubble == pytest.approx(bubble_formula(name, 64, 256, virtual_stages))


@given(STAGES, MICRO_BATCHES, st.integers(1, 3))
def test_validation_has_forward_passes_only_in_the_order_of_training(stages, n, virtual_stages):
    made = forward_only(stages, n, virtual_stages)
    longest = virtual_stages * max(n, stages) + min(n, stages) - 1
    assert simulate(made, virtual_stages).makespan == longest
    training = build("interleaved", stages, n, virtual_stages)
    for rank in range(stages):
        forwards = [a for a in training[rank] if a.kind is Kind.FORWARD]
        assert list(made[rank]) == forwards


@settings(max_examples=200)
@given(TRAINING, st.data())
def test_a_schedule_without_one_action_is_refused(size, data):
    assume(size[1:] != (1, 1, 1))  # its forward pass alone is one of validation
    schedule = [list(actions) for actions in build(*size)]
    rank = data.draw(st.integers(0, size[1] - 1))
    gone = schedule[rank].pop(data.draw(st.integers(0, len(schedule[rank]) - 1)))
    where = f"rank {rank}, micro-batch {gone.micro_batch}, virtual stage {gone.virtual_stage}"
    with pytest.raises(ScheduleError, match=where):
        simulate(tuple(map(tuple, schedule)), size[3])


@given(TRAINING, st.data())
def test_a_doubled_action_is_refused(size, data):
    schedule = list(build(*size))
    rank = data.draw(st.integers(0, size[1] - 1))
    twice = data.draw(st.sampled_from(schedule[rank]))
    schedule[rank] = (*schedule[rank], twice)
    with pytest.raises(ScheduleError, match=f"rank {rank}, micro-batch {twice.micro_batch}"):
        simulate(tuple(schedule), size[3])


@given(TRAINING, st.data())
def test_a_backward_pass_before_its_forward_pass_is_refused(size, data):
    schedule = [list(actions) for actions in build(*size)]
    rank = data.draw(st.integers(0, size[1] - 1))
    actions = schedule[rank]
    one = data.draw(st.integers(0, len(actions) - 1))
    a = actions[one]
    other = next(
        i
        for i, b in enumerate(actions)
        if b.kind is not a.kind
        and (b.micro_batch, b.virtual_stage) == (a.micro_batch, a.virtual_stage)
    )
    actions[one], actions[other] = actions[other], actions[one]
    with pytest.raises(ScheduleError, match=f"rank {rank}"):
        simulate(tuple(map(tuple, schedule)), size[3])


def test_ranks_that_wait_for_each_other_are_named_with_their_actions():
    first, second = build("1f1b", 2, 2)
    # Rank 0 wants micro-batch 0 back before it sends 1; rank 1 wants 1 first.
    first = tuple(sorted(first, key=lambda a: (a.micro_batch, a.kind is Kind.BACKWARD)))
    second = tuple(sorted(second, key=lambda a: (-a.micro_batch, a.kind is Kind.BACKWARD)))
    expected = (
        "rank 0 before backward of micro-batch 0, virtual stage 0; "
        "rank 1 before forward of micro-batch 1, virtual stage 0"
    )
    with pytest.raises(ScheduleError, match=expected):
        simulate((first, second))


def test_actions_of_a_chunk_that_does_not_exist_are_refused():
    with pytest.raises(ScheduleError, match="rank 0, micro-batch 0, virtual stage 1"):
        simulate(build("interleaved", 1, 1, 2), virtual_stages=1)


def test_nothing_to_do_is_refused():
    with pytest.raises(ScheduleError, match="nothing"):
        simulate(((), ()))


def test_communication_delays_what_comes_from_another_rank_only():
    there_and_back = build("1f1b", 2, 1)
    assert simulate(there_and_back, costs=Costs(communication=0.5)).makespan == 6 + 2 * 0.5
    alone = build("interleaved", 1, 1, 2)
    assert simulate(alone, 2, Costs(communication=0.5)).makespan == 6


def test_each_virtual_stage_may_have_its_own_costs():
    costs = [Costs(), Costs(2, 2, 2)]
    timing = simulate(build("gpipe", 2, 2), costs=costs)
    assert timing.busy == (6, 12)
    assert timing.makespan == 1 + 12 + 2
    assert timing.bubble == pytest.approx(1 - 18 / 30)


def test_a_ranks_chunks_may_differ_in_size():
    actions = build("interleaved", 2, 2, 2)[1]  # F0a F1a F0b B0b F1b B1b B0a B1a
    assert peak_live(actions) == 3
    assert peak_live(actions, [1, 10]) == 12


@pytest.mark.parametrize(
    "arguments",
    [("2f2b", 2, 2), ("1f1b", 0, 2), ("1f1b", 2, 0), ("interleaved", 2, 2, 0), ("gpipe", 2, 2, 2)],
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match=f"{arguments[0]}|virtual stages"):
        build(*arguments)


def test_an_action_tells_what_it_is():
    assert str(Action(Kind.INPUT, 3, 1)) == "input of micro-batch 3, virtual stage 1"
    assert len(set(chain.from_iterable(build("1f1b", 2, 2)))) == 4


def test_gradients_may_take_another_time_on_their_way():
    """Two stages, one micro-batch: forward there, backward back."""
    there = Costs(communication=10, back=100)
    assert simulate(build("1f1b", 2, 1), 1, there).makespan == 2 + 10 + 4 + 100
    assert simulate(build("1f1b", 2, 1), 1, Costs(communication=10)).makespan == 6 + 2 * 10


@given(TRAINING, st.integers(1, 40), st.data())
@settings(max_examples=60)
def test_the_time_of_many_micro_batches_is_predicted_from_few(size, micro_batches, data):
    name, stages, _, virtual_stages = size
    costs = tuple(
        Costs(*(data.draw(COST) for _ in range(3)), data.draw(COST), data.draw(COST))
        for _ in range(stages * virtual_stages)
    )
    played = simulate(
        build(name, stages, micro_batches, virtual_stages), virtual_stages, costs
    ).makespan
    told = makespan(name, stages, micro_batches, costs)
    if enough(stages, micro_batches) == (micro_batches,):
        assert told == played
    assert told == pytest.approx(played, rel=0.05)
