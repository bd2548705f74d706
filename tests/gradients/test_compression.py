"""Compressed sums, by ranks in one process and, marked so, over MPI."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train import compression
from hpc_train.errors import ConfigError
from hpc_train.gradients.compression import make_compressor
from hpc_train.gradients.topk import TopK, dtype_of_places, largest_places
from tests.gradients.lockstep import ranks, together

LOSSY = ["fp16", "bf16", "topk:0.1", "powersgd:2"]
SHAPES = [(9,), (12, 30), (), (40, 4, 5), (3, 4), (7,)]
SIZE = sum(math.prod(shape) for shape in SHAPES)


def cut(part, shapes=SHAPES):
    pieces = part.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class Job:
    """n ranks with a compressor each."""

    def __init__(self, text, n, shapes=SHAPES):
        self.crosses = ranks(n)
        self.compressors = [make_compressor(text) for _ in range(n)]
        self.shapes = shapes

    def sum(self, parts, number=0):
        """The ranks' results; those of all must be the same bits. `parts` are left alone."""
        parts = [part.clone() for part in parts]
        pairs = zip(self.compressors, self.crosses, parts, strict=True)
        together(*(c.sum_(x, number, part, cut(part, self.shapes)) for c, x, part in pairs))
        bits = [part.view(torch.uint8) for part in parts]
        assert all(torch.equal(bits[0], other) for other in bits)
        return parts[0]

    def unify(self):
        pairs = zip(self.compressors, self.crosses, strict=True)
        return together(*(c.unify(x) for c, x in pairs))

    def owed(self, number=0):
        """The residuals of all ranks together."""
        return sum(c.residuals[number] for c in self.compressors)


def drawn(seed, n, dtype=torch.float64, size=SIZE):
    """The ranks' parts; magnitudes that differ much, as those of gradients do."""
    seeded = torch.Generator().manual_seed(seed)
    parts = torch.randn(n, size, generator=seeded, dtype=torch.float64)
    return list((parts * torch.rand(n, size, generator=seeded, dtype=torch.float64) ** 4).to(dtype))


@pytest.mark.parametrize("text", LOSSY)
@given(n=st.integers(1, 5), seed=st.integers(0, 1000), exponent=st.integers(-60, 60))
@settings(max_examples=25)
def test_compression_loses_nothing_it_only_sends_later(text, n, seed, exponent):
    job, wanted, had = Job(text, n), 0, 0
    for step in range(4):
        parts = [part * 2.0**exponent for part in drawn(seed + step, n)]
        wanted = wanted + sum(parts)
        had = had + job.sum(parts)
        if step == 1:
            job.unify()
    scale = 2.0**exponent
    assert torch.allclose((had + job.owed()) / scale, wanted / scale, rtol=1e-12, atol=1e-12)
    assert job.owed().abs().max() > 0


@pytest.mark.parametrize(
    ("text", "bound"), [("fp16", 2**-11), ("bf16", 2**-8), ("topk:0.3", 0.5), ("powersgd:2", 1.0)]
)
def test_a_sum_is_near_the_exact_one(text, bound):
    parts = drawn(0, 3, torch.float32)
    error = Job(text, 3).sum(parts) - sum(parts)
    assert 0 < error.norm() < 3 * bound * sum(parts).norm()


@pytest.mark.parametrize("text", ["topk:1", "powersgd:100", "powersgd:2"])
@given(n=st.integers(1, 4), seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_compression_that_can_be_exact_is_exact(text, n, seed):
    """All elements; a rank too high to pay; matrices of that rank."""
    parts = drawn(seed, n)
    if text == "powersgd:2":
        left, right = (drawn(seed, 1, size=size)[0].view(-1, 2) for size in (80, 40))
        for scale, part in enumerate(parts, 1):  # the sum, too, is of rank 2
            cut(part)[3].copy_((scale * left @ right.T).view(40, 4, 5))
            cut(part)[1].copy_(torch.ones(12, 30) * scale)
    result = Job(text, n).sum(parts)
    assert torch.allclose(result, sum(parts), rtol=1e-10, atol=1e-10)


def test_topk_sends_the_largest_of_what_was_not_sent_yet():
    job = Job("topk:0.34", 2, [(3,)])  # two elements
    a, b = torch.tensor([3.0, -4.0, 1.0]), torch.tensor([0.5, 0.0, -2.0])
    assert job.sum([a, b]).tolist() == [3.5, -4.0, -2.0]
    zero = torch.zeros(3)
    assert job.sum([zero, zero]).tolist() == [0.0, 0.0, 1.0]
    assert job.owed().tolist() == [0.0, 0.0, 0.0]


@given(
    size=st.integers(1, 300_000),
    ratio=st.floats(1e-6, 1),
    kind=st.sampled_from(["normal", "few values", "zeros", "steep"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_the_largest_places_are_those_of_a_full_sort(size, ratio, kind, seed):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    if kind == "few values":
        flat = flat.round()
    if kind == "zeros":
        flat[size // 50 :] = 0
    if kind == "steep":
        flat = flat.pow(21)
    count = math.ceil(ratio * size)
    places = largest_places(flat, count)
    assert len(places.unique()) == count
    expected = flat.abs().sort(descending=True).values[:count]
    assert torch.equal(flat[places].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("text", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 100, SIZE - 1])  # a vector, a matrix, a vector
def test_a_step_that_is_not_finite_leaves_nothing_behind(text, bad, place):
    """Neither in the middle of a job nor in its first step."""
    job, healthy = Job(text, 3), Job(text, 3)
    for step in range(5):
        if step != 2:
            parts = drawn(step, 3, torch.float32)
            assert torch.equal(job.sum(parts), healthy.sum(parts))
        if step % 2 == 0:
            parts = drawn(step, 3, torch.float32)
            parts[1][place] = bad
            assert not job.sum(parts, number=step).isfinite().all()
            assert step == 0 or all(step not in c.residuals for c in job.compressors)
            if step != 0:
                assert not job.sum(parts).isfinite().all()
    assert torch.equal(job.owed(), healthy.owed())


@pytest.mark.parametrize("text", LOSSY)
def test_infinities_of_opposite_sign_and_sums_that_overflow_are_not_finite(text):
    parts = drawn(0, 2, torch.float32)
    parts[0][50], parts[1][50] = math.inf, -math.inf
    assert not Job(text, 2).sum(parts).isfinite().all()
    large = [torch.full((SIZE,), 3e38)] * 2
    job = Job(text, 2)
    assert not job.sum(large).isfinite().all()
    assert not job.compressors[0].residuals


@pytest.mark.parametrize("text", LOSSY)
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-30, 2.0**30, 2.0**100])
def test_small_and_large_gradients_are_summed_alike(text, scale):
    parts = drawn(0, 4, torch.float32)
    scaled = Job(text, 4).sum([part * scale for part in parts]) / scale
    assert torch.allclose(scaled, Job(text, 4).sum(parts), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("text", LOSSY)
@pytest.mark.parametrize("n", [2, 3])
def test_a_resumed_run_goes_on_as_the_one_that_saved(text, n):
    job, resumed = Job(text, n), Job(text, n)
    for number in (3, 0):
        for step in range(3):
            job.sum(drawn(step, n), number)
    owed = job.owed(3)
    totals = job.unify()
    assert torch.allclose(totals[0][3], owed, rtol=1e-14, atol=1e-14)
    for compressor in resumed.compressors:
        compressor.load(totals[0], n)
    for step in range(3):
        parts = drawn(10 + step, n)
        assert torch.equal(job.sum(parts, 3), resumed.sum(parts, 3))
    assert torch.equal(job.owed(3), resumed.owed(3))


def test_the_first_steps_are_exact():
    """Of each bucket, counted over the runs of a job; what an earlier run owes is in the first."""
    job, other, late = Job("powersgd:2:3", 3), Job("powersgd:2", 3), Job("powersgd:2:3", 3)
    for number in (0, 1):
        assert torch.allclose(job.sum(drawn(0, 3), number), sum(drawn(0, 3)), atol=1e-12)
    parts = drawn(0, 3)
    parts[2][5] = math.nan
    assert not job.sum(parts).isfinite().all()
    assert job.unify() == [{}] * 3
    assert [c.steps for c in job.compressors] == [2, 2, 2]
    other.sum(drawn(1, 3))
    totals = other.unify()[0]
    for compressor in late.compressors:
        compressor.load(totals, 3, 2)
    for each, owed in ((job, 0), (late, totals[0])):
        assert torch.allclose(each.sum(drawn(2, 3)), sum(drawn(2, 3)) + owed, atol=1e-12)
        assert not each.compressors[0].residuals
        assert not torch.allclose(each.sum(drawn(3, 3)), sum(drawn(3, 3)))
    late.compressors[0].load(totals, 3)
    assert late.compressors[0].steps == 3


def test_topk_comes_to_its_ratio_step_by_step():
    """At first the ring takes fewer bytes: all is sent by it."""
    job, sent = Job("topk:0.01:4", 2, [(1000,)]), []
    for step in range(6):
        before = job.crosses[0].bytes_sent
        result = job.sum(drawn(step, 2, torch.float32, 1000))
        sent.append(job.crosses[0].bytes_sent - before)
        assert step or torch.allclose(result, sum(drawn(step, 2, torch.float32, 1000)))
    assert sent == [8 * count for count in (500, 317, 100, 32, 10, 10)]


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.6, 1.0])
def test_topk_never_sends_more_than_an_exact_sum(n, ratio):
    job, plain = Job(f"topk:{ratio}", n, [(6000,)]), ranks(n)
    parts = drawn(0, n, torch.float32, 6000)
    job.sum(parts)
    together(*(cross.sum_(part, 0) for cross, part in zip(plain, parts, strict=True)))
    assert sum(x.bytes_sent for x in job.crosses) <= sum(x.bytes_sent for x in plain)


def test_topk_numbers_more_elements_than_32_bits_do():
    most = 1 << 31  # the last one's place is the largest number of 32 bits
    assert torch.iinfo(dtype_of_places(most)).max == most - 1
    assert torch.iinfo(dtype_of_places(most + 1)).max >= most
    # Two nodes send 0.4 * (4 + 4) or 0.4 * (8 + 4) bytes, where an exact sum sends 4 bytes.
    topk = TopK(0.4)
    sizes = (most, most + 1)
    exact = [topk.is_exact(0, torch.empty(size, device="meta"), 2) for size in sizes]
    assert exact == [False, True]


def test_the_residual_is_the_same_on_another_number_of_nodes():
    job, other = Job("topk:0.1", 4), Job("topk:0.1", 2)
    job.sum(drawn(0, 4))
    total = job.unify()[0]
    for compressor in other.compressors:
        compressor.load(total, 2)
    assert torch.allclose(other.owed(), job.owed(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("text", LOSSY)
def test_gradients_in_another_unit(text):
    job, scaled = Job(text, 3), Job(text, 3)
    first, second = drawn(0, 3), drawn(1, 3)
    job.sum(first)
    scaled.sum(first)
    for compressor in scaled.compressors:
        compressor.scale_(0.25)
    assert torch.allclose(scaled.sum([x / 4 for x in second]) * 4, job.sum(second), atol=1e-12)


@pytest.mark.parametrize("text", LOSSY)
def test_buckets_under_way_at_once_do_not_mix(text):
    job, serial = Job(text, 3), Job(text, 3)
    for step in range(2):
        parts = {number: drawn(10 * number + step, 3) for number in range(3)}
        expected = {number: serial.sum(parts[number], number) for number in parts}
        calls = zip(job.compressors, job.crosses, range(3), strict=True)
        together(
            *(
                c.sum_(x, number, parts[number][rank], cut(parts[number][rank]))
                for c, x, rank in calls
                for number in range(3)
            )
        )
        for number, ours in parts.items():
            assert all(torch.equal(part, expected[number]) for part in ours)


@pytest.mark.parametrize("text", LOSSY)
def test_a_rank_with_an_empty_part(text):
    assert Job(text, 2, []).sum([torch.zeros(0)] * 2).numel() == 0


def expected_bytes(text, n, itemsize):
    """Sent by each of n ranks for parts of SIZE elements of float32; without the ring's rest."""
    ring = 2 * (n - 1) / n
    if text in ("fp16", "bf16"):
        return ring * 2 * SIZE
    if text.startswith("topk"):
        return (n - 1) * math.ceil(0.1 * SIZE) * (4 + itemsize)
    plain = 9 + 1 + 3 * 4 + 7  # what follows are the two matrices that pay
    return ring * itemsize * (plain + 2 * (12 + 30) + 2 * (40 + 20))


@pytest.mark.parametrize("text", LOSSY)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_sent(text, n, dtype):
    job = Job(text, n)
    for step in range(3):
        job.sum(drawn(step, n, dtype))
    sent = sum(cross.bytes_sent for cross in job.crosses)  # over the ranks the rest evens out
    assert sent == pytest.approx(3 * n * expected_bytes(text, n, dtype.itemsize))


@pytest.mark.parametrize("text", [*LOSSY, "topk:0.03"])
def test_least_squares_converge_as_without_compression(text):
    """The ranks have different samples, and the optimum's residuals are not zero."""
    n, shape, steps = 4, (20, 25), 600
    seeded = torch.Generator().manual_seed(0)
    inputs, truth, noise = (
        torch.randn(*size, generator=seeded, dtype=torch.float64)
        for size in [(n, 60, 20), shape, (n, 60, 25)]
    )
    outputs = inputs @ truth + 0.3 * noise

    def error(at):
        return (inputs @ at - outputs).square().mean().item()

    def descended(job):
        weights = torch.zeros(shape, dtype=torch.float64)
        for step in range(steps):
            gradients = (inputs.mT @ (inputs @ weights - outputs) / (60 * n)).flatten(1)
            rate = 0.1 * (1 - step / steps)
            weights -= rate * job.sum(list(gradients)).view(shape)
        return weights

    job = Job(text, n, [shape])
    assert error(descended(job)) < 1.01 * error(descended(Job("topk:1", n, [shape])))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("text", LOSSY)
def test_over_mpi(group, text):
    """Two buckets at once: nothing is lost, all ranks have the same bits, bytes are as computed."""
    from hpc_train.collectives.coroutines import CoroutineScheduler, drive
    from hpc_train.collectives.ring import Ring

    ring, compressor, scheduler = Ring(group), make_compressor(text), CoroutineScheduler()
    wanted, had = torch.zeros(2, SIZE).double(), torch.zeros(2, SIZE).double()
    for step in range(3):
        parts = [drawn(10 * step + number, group.size) for number in range(2)]
        for number, part in enumerate(parts):
            wanted[number] += sum(part)
            mine = part[group.rank]
            scheduler.start(compressor.sum_(ring, number, mine, cut(mine)))
        scheduler.finish(polite=True)
        had += torch.stack([part[group.rank] for part in parts])
    sent = sum(group.comm.allgather(ring.bytes_sent))
    results = group.comm.allgather(had.tolist())
    owed = drive(compressor.unify(ring), polite=True)
    lost = torch.zeros(SIZE).double()
    lost[100] = math.nan if group.rank == group.size - 1 else 0.0
    drive(compressor.sum_(ring, 0, lost, cut(lost)), polite=True)
    assert lost.isnan().any()
    assert torch.equal(compressor.residuals[0], owed[0] / group.size)
    assert all(result == results[0] for result in results)
    assert torch.allclose(had + torch.stack([owed[0], owed[1]]), wanted, rtol=1e-12, atol=1e-12)
    assert sent == pytest.approx(6 * group.size * expected_bytes(text, group.size, 8))


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("none", ("none", 0, 0)),
        ("fp16", ("fp16", 0, 0)),
        ("bf16", ("bf16", 0, 0)),
        ("topk", ("topk", 0.01, 0)),
        ("topk:1", ("topk", 1.0, 0)),
        ("topk:.5", ("topk", 0.5, 0)),
        ("topk:1e-3:50", ("topk", 0.001, 50)),
        ("powersgd", ("powersgd", 4, 0)),
        ("powersgd:12", ("powersgd", 12, 0)),
        ("powersgd:2:100", ("powersgd", 2, 100)),
    ],
)
def test_texts(text, scheme):
    assert compression.parse_scheme(text) == scheme
    assert (make_compressor(text) is None) == (text == "none")


@pytest.mark.parametrize(
    "text",
    [
        *["", "fp8", "FP16", "fp16:2", "none:", "topk:", "topk:0", "topk:1.1", "topk:-1"],
        *["topk:nan", "topk:1e-999", "topk:1_0", "topk:0.1 ", "topk:0.1:-2", "powersgd:"],
        *["topk:0.1:", "topk:0.1:2:3", "topk::2", "topk:0.1:1.5", "fp16:1:2"],
        *["powersgd:0", "powersgd:1.5", "powersgd:-1", "powersgd:x", "powersgd:\u0661"],
    ],
)
def test_texts_that_are_refused(text):
    with pytest.raises(ConfigError, match="gradients.compression is .*: it takes none, fp16"):
        make_compressor(text)
