"""Saves states in random layouts on some ranks, and loads them in others on other ranks.

    mpirun -np 8 python -m tests.system.checkpoint.reshard --cases 60 --seed 1

Each case has tensors of all types and shapes, cut at random places, along any dimension and also
between rows, with parts that several ranks hold. All ranks draw the same cases from the seed. The
file has to be what one process writes of the whole, and what is loaded has to be what was saved.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpc_train.checkpoint import fileformat, restore, state
from hpc_train.checkpoint.fileformat import LocalTensor, TensorForm, format_dtypes
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.sharding import ParameterSlice, SliceSpec
from tests.checkpoint.states import SMALL, save_tensors

CONTENT = b'{"step":3}'

Whole = Mapping[str, Tensor]


class Layout(NamedTuple):
    """Which ranks take part, and what each rank of a replica holds.

    Args:
        ranks: how many of the job take part.
        replica: how many of them hold a state together.
        shards: of each rank of a replica, by the tensors' names.
    """

    ranks: int
    replica: int
    shards: list[dict[str, ParameterSlice]]


def draw_whole(random: Random) -> dict[str, Tensor]:
    """Tensors of random bytes: empty ones, scalars, and some that are larger than an extent."""
    whole = {}
    for number in range(random.randint(1, 8)):
        dtype = random.choice(list(format_dtypes()))
        dimensions = random.choice([0, 1, 1, 2, 2, 2, 3])
        shape = [random.choice([0, 1, 2, 3, 5, 8, 13, 30]) for _ in range(dimensions)]
        data = random.randbytes(math.prod(shape) * dtype.itemsize)
        if dtype is torch.bool:
            data = bytes(byte % 2 for byte in data)
        flat = torch.empty(math.prod(shape), dtype=dtype)
        if data:
            flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        whole[f"model.t{number}"] = flat.view(shape)
    return whole


def draw_layout(random: Random, forms: Mapping[str, TensorForm], most: int) -> Layout:
    """On at most so many ranks."""
    ranks = random.randint(1, most)
    replica = random.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    shards: list[dict[str, ParameterSlice]] = [{} for _ in range(replica)]
    for name, (_, shape) in forms.items():
        count = replica if random.random() < 0.7 else random.randint(1, replica)
        holders = random.sample(range(replica), count)
        specs = draw_specs(random, shape, len(holders))
        for index, rank in enumerate(holders):
            spec = specs[index % len(specs)]
            local = name.removeprefix(state.MODEL)
            shards[rank][name] = ParameterSlice(local, spec, owned=index < len(specs))
    return Layout(ranks, replica, shards)


def draw_specs(random: Random, shape: tuple[int, ...], most: int) -> list[SliceSpec]:
    """Parts that cover a tensor: at most so many."""
    if not shape or random.random() < 0.2:
        return [SliceSpec.whole(shape)]
    dim = random.randrange(len(shape))
    parts = random.choice([random.randint(1, most), most // 2 or 1])
    cuts = draw_cuts(random, shape[dim], parts)
    specs = [SliceSpec(shape, dim, *cut) for cut in cuts]
    rows = min(most // parts, specs[0].local_shape[0])
    if rows < 2 or dim == 0 or random.random() < 0.3:
        return specs
    between = sorted(random.sample(range(1, shape[0]), rows - 1))
    pairs = list(zip([0, *between], [*between, shape[0]], strict=True))
    return [spec.rows(*pair) for spec in specs for pair in pairs]


def draw_cuts(random: Random, size: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive ranges that cover 0 to size; some may be empty."""
    between = sorted(random.randint(0, size) for _ in range(parts - 1))
    return list(zip([0, *between], [*between, size], strict=True))


def view_of(tensor: Tensor, spec: SliceSpec) -> Tensor:
    """The part, where it lies in the whole."""
    if spec.shape:
        tensor = tensor.narrow(spec.dim, spec.start, spec.stop - spec.start)
    return tensor.narrow(0, spec.first, spec.last - spec.first) if spec.last else tensor


def held_by(rank: int, layout: Layout, whole: Whole) -> dict[str, LocalTensor]:
    """What a rank holds, as a model whose own names differ, and where each tensor is tied."""
    model, shards = nn.Module(), {}
    for number, (name, shard) in enumerate(layout.shards[rank % layout.replica].items()):
        part = view_of(whole[name], shard.spec).clone(memory_format=torch.contiguous_format)
        model.register_buffer(f"a{number}", part)
        model.register_buffer(f"tied{number}", part)
        shards[f"a{number}"] = shard
    return state.model_tensors(model, shards)


def write(path: Path, layout: Layout, whole: Whole, group: Group) -> None:
    """Save with the ranks of the group; what a rank does not own is something else there."""
    replica = group.split(group.rank // layout.replica, group.rank)
    held = held_by(group.rank, layout, whole)
    for part in held.values():
        if not part.owned:
            part.tensor.view(-1).view(torch.uint8).bitwise_not_()
    save_tensors(path, held, CONTENT, group, replica=replica)
    replica.close()


def read(path: Path, layout: Layout, whole: Whole, group: Group) -> str:
    """Load with the ranks of the group, as replicas and as one; what is wrong."""
    replica = group.split(group.rank // layout.replica, group.rank)
    alike = group.split(group.rank % layout.replica, group.rank)
    reader = restore.open_together(path, group)
    wrong = ""
    for groups in ((replica, alike), ()):
        nothing = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        held = held_by(group.rank, layout, nothing)
        restore.load_tensors(reader, held, group, *groups)
        wrong += compared(held, layout, whole, group)
    replica.close()
    alike.close()
    return wrong


def compared(held: dict[str, LocalTensor], layout: Layout, whole: Whole, group: Group) -> str:
    """What is wrong with what was loaded. Collective."""
    wanted = held_by(group.rank, layout, whole)
    wrong = [n for n, part in held.items() if digest(part.tensor) != digest(wanted[n].tensor)]
    sent = {n: replace(p, tensor=p.tensor.view(-1).view(torch.uint8)) for n, p in held.items()}
    parts = [sent] if group.comm is None else group.comm.allgather(sent)  # torch pickles few types
    made = [n for n, t in whole.items() if digest(joined(n, parts, t)) != digest(t)]
    return f"parts {wrong}, wholes {made}" if wrong or made else ""


def joined(name: str, parts: list[dict[str, LocalTensor]], like: Tensor) -> Tensor:
    """A tensor, of the bytes of the parts that ranks have loaded and own."""
    whole = torch.zeros_like(like)
    for held in parts:
        if name in held and held[name].owned:
            part = view_of(whole, held[name].spec)
            part.copy_(held[name].tensor.view(like.dtype).view(part.shape))
    return whole


def digest(tensor: Tensor) -> bytes:
    """The hash of a tensor's bytes, whatever numbers they stand for."""
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).digest()


def among(world: Group, ranks: int) -> Group | None:
    """The first so many ranks of the job; None on the others. Collective."""
    group = world.split(int(world.rank >= ranks), world.rank)
    if world.rank < ranks:
        return group
    group.close()
    return None


def try_case(folder: Path, world: Group, seed: str) -> str:
    """What is wrong with one case, on this rank. Collective."""
    random = Random(seed)
    whole = draw_whole(random)
    forms = {name: LocalTensor.whole(tensor).form for name, tensor in whole.items()}
    first, second = (draw_layout(random, forms, world.size) for _ in range(2))
    path, wrong = folder / "together", ""
    if group := among(world, first.ranks):
        write(path, first, whole, group)
        group.close()
    world.barrier()
    if world.rank == 0:
        everything = {name: LocalTensor.whole(tensor) for name, tensor in whole.items()}
        save_tensors(folder / "alone", everything, CONTENT, Group())
        wrong = "" if path.read_bytes() == (folder / "alone").read_bytes() else "the file's bytes, "
    if group := among(world, second.ranks):
        wrong += read(path, second, whole, group)
        group.close()
    world.barrier()
    return wrong and f"case {seed}, {first} to {second}: {wrong}"


def try_many(folder: Path, world: Group, cases: int, seed: int) -> list[str]:
    """What is wrong with so many cases, on this rank. Collective."""
    tried = (try_case(folder, world, f"{seed}.{number}") for number in range(cases))
    return [wrong for wrong in tried if wrong]


def main() -> None:
    """Be one of the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    vars(fileformat).update(SMALL)
    started = runtime.start_runtime()
    world = started.world
    with tempfile.TemporaryDirectory() as name:
        folder = Path(world.from_first(lambda: name))
        wrong = try_many(folder, world, options.cases, options.seed)
        world.barrier()
    for line in wrong:
        print(f"rank {world.rank}: {line}", flush=True)
    failed = world.largest(len(wrong))
    if world.rank == 0:
        print(f"{options.cases} cases on up to {world.size} ranks, {failed} wrong")
    started.close()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
