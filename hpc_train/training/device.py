"""The processor or GPU that this rank computes on."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch

from hpc_train.data.pinned import each_tensor
from hpc_train.errors import ConfigError
from hpc_train.host.memory import free_bytes
from hpc_train.host.processor import Matmul
from hpc_train.models import linear
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime

logger = logging.getLogger(__name__)


def choose_device(local_rank: int = 0) -> torch.device:
    """The GPU that this rank computes on, else the CPU.

    `start_runtime` has left one GPU visible to each rank. Where it found no driver's file to count
    GPUs by, torch may see several; then the local rank chooses.

    Args:
        local_rank: this rank's number on its node, as MPI has it.
    """
    for kind in ("cuda", "xpu"):  # "cuda" is AMD's GPUs, too
        module = getattr(torch, kind)
        if module.is_available():
            device = torch.device(kind, local_rank % module.device_count())
            if device.index:
                module.set_device(device)
            return device
    return torch.device("cpu")


def tell_gpu(group: Group, device: torch.device) -> None:
    """Log on rank 0 which GPU computes, and what torch may use on it."""
    if group.rank or device.type == "cpu":
        return
    name = getattr(torch, device.type).get_device_name(device)
    if device.type != "cuda":
        logger.info("GPU: %s", name)
        return
    kinds = ("flash", "mem_efficient", "cudnn", "math")
    ways = [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled", bool)()]
    tf32 = "full precision" if torch.get_float32_matmul_precision() == "highest" else "TF32"
    logger.info("GPU: %s; attention by %s; float32 in %s", name, ", ".join(ways), tf32)


def built_for() -> tuple[str, str]:
    """The build of torch (CUDA, ROCm, XPU, processors), and why it finds no GPU of that kind.

    The reason is "" if it finds one, and if it does not say.
    """
    hip, cuda, xpu = (getattr(torch.version, name, None) for name in ("hip", "cuda", "xpu"))
    build = "ROCm" if hip else "CUDA" if cuda else "XPU" if xpu else "processors"
    module = torch.xpu if build == "XPU" else torch.cuda
    if build == "processors" or module.device_count():
        return build, ""
    try:
        module.init()
    except Exception as error:  # noqa: BLE001  # drivers fail in many ways
        return build, " ".join(str(error).split())
    return build, ""


def use_cores(runtime: Runtime) -> None:
    """Let torch use this rank's share of the node's cores, unless OMP_NUM_THREADS says otherwise.

    Without a limit every rank would start as many threads as its node has cores.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(runtime.cores)


def threads_in_use(group: Group, device: torch.device) -> int:
    """The largest number of threads that a rank computes with. Collective.

    The order of additions on processors depends on it. GPUs add in their own order, so it is 0.
    """
    return group.largest(torch.get_num_threads() if device.type == "cpu" else 0)


def choose_matmul(group: Group, wanted: Matmul, device: torch.device) -> None:
    """Choose how linear layers multiply float32 matrices, alike on all ranks. Collective.

    Rank 0 logs the choice, if any rank computes on a processor.

    Args:
        group: all ranks of the job.
        wanted: a way, or "auto" for the way in the table of processors. If the ranks' processors
            need different ways, all ranks take torch's.
        device: the device that this rank computes on.

    Raises:
        ConfigError: onednn is wanted, but does not work on some rank.
    """
    with agreed(group):
        if wanted == "onednn" and device.type != "cpu":
            raise ConfigError(
                "precision.matmul is onednn, but training is on a GPU", "leave it out"
            )
        mine = linear.of_table()
        if wanted != "auto":
            mine = linear.MatmulChoice(wanted, f"precision.matmul is {wanted}")
        linear.use(mine.way)
    everyone = group.gathered((mine, group.host, device.type), "their ways to multiply matrices")
    differ = len({choice.way for choice, _, _ in everyone}) > 1
    if differ:
        linear.use("torch")
    if group.rank == 0 and any(kind == "cpu" for _, _, kind in everyone):
        why = _reasons([(choice.why, host) for choice, host, _ in everyone])
        if differ:
            logger.warning("float32 matrix products: torch, as the hosts differ (%s)", why)
        else:
            logger.info("float32 matrix products: %s (%s)", linear.used(), why)


def _reasons(given: list[tuple[str, str]]) -> str:
    """The ranks' reasons as text. If they differ, each one names a host that has it."""
    hosts: dict[str, set[str]] = {}
    for why, host in given:
        hosts.setdefault(why, set()).add(host)
    if len(hosts) == 1:
        return given[0][0]
    return "; ".join(
        f"{min(names)}{f' and {len(names) - 1} more' * (len(names) > 1)}: {why}"
        for why, names in hosts.items()
    )


def make_deterministic() -> None:
    """Make repeated runs of one layout give the same bits. Call it before Horovod starts.

    Horovod fuses tensors that happen to be ready at the same moment. A tensor's place in the fused
    buffer decides the order in which MPI adds its parts. Without fusion this order is fixed.
    """
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:  # does the same without torch.compile, which takes as long to load as torch itself
        torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False


def free_memory_of(device: torch.device) -> int:
    """Bytes that are free on a GPU, or on this node."""
    if device.type == "cpu":
        return free_bytes()
    free: int = getattr(torch, device.type).mem_get_info()[0]
    return free


def whole_memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU's memory, free or not; None for processors."""
    if device.type == "cpu":
        return None
    whole: int = getattr(torch, device.type).mem_get_info()[1]
    return whole


def moved(data: Any, device: torch.device) -> Any:
    """A batch on a device: all of its tensors, also those inside lists, tuples and dicts."""
    return each_tensor(data, lambda tensor: tensor.to(device, non_blocking=True))
