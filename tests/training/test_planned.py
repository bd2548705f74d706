from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from hpc_train.config.file import load
from hpc_train.errors import ConfigError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.planning.model import planned_shape
from hpc_train.training import planned

FULL = "['--data.path', 'd', '--model.vocab', '256', '--memory.recompute', 'full']"
PLANNED = f"""
from hpc_train.config.file import load
from hpc_train.planning.model import planned_shape
from hpc_train.training.planned import job_that_fits
config = load(None, {FULL})
job_that_fits(config, planned_shape(config), runtime)
"""
LOOP = """
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from hpc_train.config import MemorySection
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
layers.memory_blocks = ("*",)
options = LoopOptions(memory=MemorySection(recompute="full"))
loop = Loop(runtime, "run", layers, torch.optim.SGD(layers.parameters(), 0.1), options)
"""
# What lives long lies between what is freed, as the inputs of blocks lie between their activations.
AFTER = """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

before = resident()
kept = []
for _ in range(20):
    freed = torch.ones(4 << 18)  # 4 MiB
    kept.append(torch.ones(1 << 19))  # 2 MiB
    del freed
    larger = torch.ones(6 << 18)
    del larger
print("MiB", (resident() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize("made", [PLANNED, LOOP], ids=["train", "loop"])
def test_recomputation_leaves_no_gaps_between_tensors(tmp_path, made):
    start = "import resource, torch\nfrom hpc_train.mpi.runtime import start_runtime\n"
    program = f"{start}runtime = start_runtime()\n{made}{AFTER}"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert int(told.stdout.split()[-1]) < 45, told.stdout


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_job_on_gpus_is_refused_if_its_hosts_have_no_room(monkeypatch, offload):
    """The GPUs have enough for any job. A copy for checkpoints is in the memory of the host."""
    kept = 5 << 20 if offload == "optimizer" else 0
    free = {"cuda": 1 << 40, "cpu": kept}
    monkeypatch.setattr(planned, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(planned, "free_memory_of", lambda device: free[device.type])
    runtime = Runtime(Group(), Group())
    model = ["--model.vocab=256", "--model.layers=1", "--model.hidden=128", "--model.heads=2"]
    options = [*model, f"--memory.offload={offload}", "--checkpoint.every=1"]
    waits, copies = (
        load(None, [*options, f"--checkpoint.background={value}"]) for value in ("false", "true")
    )
    planned.job_that_fits(waits, planned_shape(waits), runtime)
    with pytest.raises(ConfigError, match="give --checkpoint.background false"):
        planned.job_that_fits(copies, planned_shape(copies), runtime)
