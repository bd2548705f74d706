from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from hpc_train.collectives import connect
from hpc_train.errors import UserError
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

pytestmark = pytest.mark.mpi
SHAPES = [(), (0,), (1,), (7, 3), (5000,)]
needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")


@pytest.fixture(params=["own", "in a thread", pytest.param("horovod", marks=needs_horovod)])
def join(request, job, group, group_size):
    """Makes the collectives of a group's ranks by each implementation; None on other ranks."""
    if group_size == 1 and request.param != "own":
        pytest.skip("connect never makes one for a rank alone")
    made = []

    def own():
        made.append(connect(group if group_size > 1 else Group(), overlap=request.param != "own"))
        return made[-1]

    def horovods():
        from hpc_train.collectives.horovod import HorovodCollectives

        return HorovodCollectives(group, hvd)

    if request.param == "horovod":
        hvd = runtime.start_horovod(job.world, [[0, 1], [0, 1, 2]][: job.world.size - 2])
    yield group and (horovods if request.param == "horovod" else own)
    for each in made if group_size > 1 else ():
        each.close()


@pytest.fixture
def group_size(request):
    return request.node.callspec.params["group"]


def of_rank(rank, shape, dtype):
    """What a rank brings; every other one of them in another order in memory."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return made if rank % 2 else made.transpose(0, -1).contiguous().transpose(0, -1)


def added(tensors):
    """Their sum, rounded once."""
    return torch.stack(tensors).double().sum(0).to(tensors[0].dtype)


@pytest.mark.ranks(1, 2, 3, 4)
class TestEveryImplementation:
    """What all of them promise, against torch on the tensors of all ranks."""

    @pytest.fixture(
        params=[torch.float64, torch.float32, torch.bfloat16],
        ids=["float64", "float32", "bfloat16"],
    )
    def implementation(self, request, join):
        """One of the collectives, and for a shape what its ranks bring."""
        if not join:
            return None
        over = join()

        def tensors(*shape):
            return [of_rank(rank, shape, request.param) for rank in range(over.group.size)]

        return over, tensors

    def test_sum_max_and_broadcast_replace_a_tensor_of_any_strides(self, implementation):
        over, tensors = implementation
        found = [tensors(4, 3, 5)[over.group.rank] for _ in range(4)]
        over.sum_(found[0])
        over.max_(found[1])
        over.broadcast_(found[2])
        over.broadcast_(found[3], over.group.size - 1)
        every = tensors(4, 3, 5)
        stacked = torch.stack(every)
        expected = [added(every), stacked.amax(0), every[0], every[-1]]
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64])
    def test_broadcast_and_gather_take_any_type(self, join, dtype):
        over = join()
        last = over.group.size - 1
        sent = [torch.full(shape, over.group.rank == last).to(dtype) for shape in [(), (2, 3)]]
        gathered = over.start_gather(sent[1], 1).wait()
        for tensor in sent:
            over.broadcast_(tensor, last)
        expected = torch.tensor([False, False, False] * last + [True] * 3).to(dtype)
        assert torch.equal(gathered, expected.expand(2, -1))
        assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in sent)

    def test_one_element_of_a_larger_tensor(self, join):
        over = join()
        last = over.group.size - 1
        mine = torch.full((1, 4), over.group.rank + 1.0).t()[1:2]  # (1, 1), with strides (1, 4)
        gathered = over.start_gather(mine, 1).wait()
        over.broadcast_(mine, last)
        assert gathered.tolist() == [[rank + 1.0 for rank in range(last + 1)]]
        assert mine.tolist() == [[last + 1.0]]

    def test_views_that_stand_for_other_numbers_than_memory_has(self, join):
        over = join()
        rank, last = over.group.rank, over.group.size - 1
        ones = torch.full((3, 2), rank + 1.0)
        mine = [torch.complex(torch.zeros(3, 2), ones).conj().imag for _ in range(4)]
        assert all(one.is_neg() for one in mine)
        over.sum_(mine[0])
        over.max_(mine[1])
        over.broadcast_(mine[2], last)
        gathered = over.start_gather(mine[3], 0).wait()
        turned = torch.tensor([1j * (rank + 1)]).conj()
        over.broadcast_(turned if rank != 1 else turned.resolve_conj())
        numbers = [-number - 1.0 for number in range(last + 1)]
        assert [one.unique().tolist() for one in mine[:3]] == [[sum(numbers)], [-1], [numbers[-1]]]
        assert gathered[::3, 0].tolist() == numbers
        assert turned.tolist() == [-1j] or rank == 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_elements_may_lie_at_one_place(self, join, dtype):
        over = join()
        number = over.group.rank + 1.0
        total, largest = (torch.full((4, 1), number, dtype=dtype).expand(4, 3) for _ in range(2))
        over.sum_(total)
        over.max_(largest)
        size = over.group.size
        assert total.unique().tolist() == [size * (size + 1) / 2]
        assert largest.unique().tolist() == [size]

    def test_a_tensor_without_dimensions_is_neither_joined_nor_cut(self, join):
        over = join()
        for start in (over.start_gather, over.start_sum_scatter):
            with pytest.raises(UserError, match="tensor without dimensions: give it a first"):
                start(torch.tensor(1.0), 0)

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_gather_joins_and_sum_scatter_cuts_along_a_dimension(self, implementation, dim):
        over, tensors = implementation
        size, rank = over.group.size, over.group.rank
        every = tensors(2 * size, 3 * size, size)
        mine = every[rank].clone()
        gathered = over.start_gather(every[rank], dim).wait()
        part = over.start_sum_scatter(every[rank], dim).wait()
        torch.testing.assert_close(gathered, torch.cat(every, dim))
        torch.testing.assert_close(part, added(every).chunk(size, dim)[rank])
        assert torch.equal(every[rank], mine)

    def test_many_operations_overlap_also_of_two_groups_of_the_same_ranks(
        self, implementation, join
    ):
        over, tensors = implementation
        twin, size, rank = join(), over.group.size, over.group.rank
        every = tensors(4 * size, 3)
        mine = [every[rank].clone(memory_format=torch.contiguous_format) for _ in range(6)]
        pending = []
        for one, tensor in zip([over, twin] * 3, mine, strict=True):
            pending.append(one.start_sum_(tensor))
            pending.append(one.start_gather(every[rank], 1))
            pending.append(one.start_sum_scatter(every[rank], 0))
        found = [each.wait() for each in pending]
        total = added(every)
        for summed, gathered, part in zip(found[::3], found[1::3], found[2::3], strict=True):
            torch.testing.assert_close(summed, total)
            torch.testing.assert_close(gathered, torch.cat(every, 1))
            torch.testing.assert_close(part, total.chunk(size)[rank])
        for tensor in mine:
            torch.testing.assert_close(tensor, total)


@pytest.fixture(params=[1 << 30, 64], ids=["one piece", "pieces"])
def pieces(request, monkeypatch):
    # By name: this module is read in one process too, and importing mpi4py.MPI would start MPI.
    monkeypatch.setattr("hpc_train.collectives.mpi.LARGEST_MESSAGE", request.param)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.int32])
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_is_over_all_ranks(group, pieces, shape, dtype):
    tensor = torch.full(shape, group.rank + 1, dtype=dtype)
    connect(group).sum_(tensor)
    assert torch.equal(tensor, torch.full(shape, sum(range(1, group.size + 1)), dtype=dtype))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_broadcast_takes_any_type(group, pieces, shape, dtype):
    root = group.size - 1
    tensor = torch.full(shape, float(group.rank == root)).to(dtype)
    connect(group).broadcast_(tensor, root)
    assert torch.equal(tensor, torch.ones(shape).to(dtype))


@pytest.mark.ranks(1, 2, 3, 4)
def test_tensors_may_lie_in_any_order(group):
    tensor = torch.full((2, 3, 4, 5), float(group.rank)).to(memory_format=torch.channels_last)
    connect(group).broadcast_(tensor, group.size - 1)
    assert torch.equal(tensor, torch.full((2, 3, 4, 5), group.size - 1.0))
    connect(group).sum_(tensor)
    assert torch.equal(tensor, torch.full((2, 3, 4, 5), group.size * (group.size - 1.0)))


class Limited:
    """A communicator that refuses large counts, as MPI-3 does from 2 ** 31 on."""

    def __init__(self, comm, nbytes):
        self.comm, self.nbytes = comm, nbytes

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Allgather(self, mine, every):  # noqa: N802  # mpi4py's name
        assert every[0].nbytes <= self.nbytes
        self.comm.Allgather(mine, every)

    def Reduce_scatter_block(self, every, mine, op):  # noqa: N802  # mpi4py's name
        assert every[0].nbytes <= self.nbytes
        self.comm.Reduce_scatter_block(every, mine, op=op)


@pytest.mark.ranks(1, 2, 4)  # 3 does not divide the shape
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 8, 12), (4, 0, 12)])
def test_gathers_and_scatters_are_split_where_counts_would_be_too_large(
    group, monkeypatch, shape, dim
):
    monkeypatch.setattr("hpc_train.collectives.mpi.LARGEST_MESSAGE", 320)
    over = connect(group)
    if group.comm is not None:
        over.comm = Limited(group.comm, 320)
    every = [of_rank(rank, shape, torch.float64) for rank in range(group.size)]
    gathered = over.start_gather(every[group.rank], dim).wait()
    part = over.start_sum_scatter(every[group.rank], dim).wait()
    assert torch.equal(gathered, torch.cat(every, dim))
    torch.testing.assert_close(part, sum(every).chunk(group.size, dim)[group.rank])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_are_added_in_float32_and_rounded_once(group, pieces, dtype):
    over, rank, size = connect(group), group.rank, group.size
    tensor = torch.full((size, 3), 256.0 if rank == 0 else 1.0, dtype=dtype)
    part = over.start_sum_scatter(tensor, 0).wait()
    over.start_sum_(tensor).wait()
    # One by one, ones would be lost: bfloat16 has no 257.
    expected = torch.tensor(256.0 + size - 1).to(dtype)
    assert torch.equal(tensor, expected.expand(size, 3))
    assert torch.equal(part, expected.expand(1, 3))


@pytest.mark.ranks(2, 3, 4)
def test_what_mpi_cannot_add_is_refused(group):
    for call in (connect(group).sum_, lambda t: connect(group).start_sum_scatter(t, 0)):
        with pytest.raises(TypeError, match="cannot add torch.int16"):
            call(torch.ones(group.size, dtype=torch.int16))


@pytest.mark.ranks(2)
def test_a_thread_and_its_caller_wait_for_each_others_work_on_a_gpu(group, monkeypatch):
    caller, waited = threading.get_ident(), []

    def work_of(tensor):
        told = threading.get_ident() == caller
        return lambda: waited.append((told, threading.get_ident() == caller, float(tensor[0])))

    monkeypatch.setattr("hpc_train.collectives.mpi.work_of", work_of)
    over, tensor = connect(group, overlap=True), torch.ones(3)
    over.start_sum_(tensor).wait()
    over.close()
    # The thread waits for the caller's work before the sum, and for its own after it.
    assert waited == [(True, False, 1.0), (False, False, float(group.size))]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("most", [1 << 30, 64])
def test_mpi_gets_memory_with_which_a_gpu_has_done(group, monkeypatch, most, dim):
    """As with an MPI that reads the memory of GPUs: nothing on the GPU waits for MPI."""
    from hpc_train.collectives import mpi

    make, ready, order = mpi.reachable, set(), []

    def reachable(tensor):
        near = make(tensor)
        ready.update(range(near.data_ptr(), near.data_ptr() + near.nbytes))
        return near

    class Comm:
        def __getattr__(self, name):
            return getattr(group.comm, name)

        def Allgather(self, mine, every):  # noqa: N802  # mpi4py's name
            order.append("MPI")
            group.comm.Allgather(mine, every)

        def Reduce_scatter_block(self, every, mine, op):  # noqa: N802  # mpi4py's name
            assert every[0].address in ready
            group.comm.Reduce_scatter_block(every, mine, op=op)

    monkeypatch.setattr(mpi, "LARGEST_MESSAGE", most)
    monkeypatch.setattr(mpi, "reachable", reachable)
    monkeypatch.setattr(mpi, "work_of", lambda tensor: lambda: order.append("waited"))
    over = connect(group)
    over.comm = Comm()
    tensor = torch.arange(24.0).view(4, 6)
    part = over.start_sum_scatter(tensor, dim).wait()
    assert torch.equal(part, 2 * tensor.chunk(2, dim)[group.rank])
    over.start_gather(tensor, dim).wait()
    assert order == (["MPI"] if most > 64 else ["MPI", "waited"] * 3)


def test_memory_that_a_thread_has_made_stays_until_the_callers_stream_is_done(monkeypatch):
    from hpc_train.collectives import mpi

    seen, future = [], Future()
    future.set_result(SimpleNamespace(device=torch.device("cuda"), record_stream=seen.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    mpi.InThread(Group(), future).wait()
    assert seen == ["the caller's"]


@pytest.mark.ranks(1, 2, 3, 4)
def test_ranks_with_unlike_cores_agree_on_a_thread(group):
    """A rank with fewer cores than the others would not make the communicator that they make."""
    found = []
    for wanted in (group.rank > 0, True):
        over = connect(group, overlap=wanted)
        tensor = torch.full((3,), group.rank + 1.0)
        over.start_sum_(tensor).wait()
        found.append((over.overlaps, tensor[0].item()))
        over.close()
    total = sum(range(1, group.size + 1))
    assert found == [(False, total), (True, total)]


@pytest.mark.parametrize(
    ("device", "reads", "through"),
    [
        ("cpu", False, False),
        ("cuda", False, True),
        ("cuda", True, False),
        ("xpu", False, True),
        ("xpu", True, True),  # the library was asked about CUDA
    ],
)
def test_tensors_of_gpus_go_through_host_memory_unless_mpi_reads_them(
    monkeypatch, device, reads, through
):
    from hpc_train.collectives import mpi

    monkeypatch.setattr(mpi, "reads_gpu_memory", lambda: reads)
    assert mpi.through_host(torch.device(device)) == through


@pytest.mark.parametrize(
    ("hip", "functions", "reads"),
    [
        (None, {"MPIX_Query_cuda_support": 1}, True),
        (None, {"MPIX_Query_cuda_support": 0}, False),
        (None, {"MPIX_Query_rocm_support": 1}, False),
        ("6.4", {"MPIX_Query_cuda_support": 1, "MPIX_Query_rocm_support": 0}, False),
        ("6.4", {"MPIX_Query_rocm_support": 1}, True),  # Open MPI
        ("6.4", {"MPIX_Query_hip_support": 1}, True),  # MPICH
        ("6.4", {}, False),
    ],
)
def test_mpi_is_asked_about_the_gpus_that_torch_computes_on(monkeypatch, hip, functions, reads):
    from hpc_train.collectives import mpi

    library = SimpleNamespace(
        **{name: lambda value=value: value for name, value in functions.items()}
    )
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    monkeypatch.setattr(mpi.ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert mpi.reads_gpu_memory.__wrapped__() == reads
