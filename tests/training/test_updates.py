"""A loop that is left before registered objects were updated in its last batch."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.loop import Loop


@pytest.mark.parametrize(
    ("leave", "told"),
    [
        ("after the step", "before the update of ema, scheduler that other steps had"),
        ("after the batch", ""),
    ],
)
def test_what_was_not_updated_in_the_last_batch_is_told(tmp_path, caplog, leave, told):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, each_epoch = StepLR(optimizer, 1), StepLR(optimizer, 1)
    ema = AveragedModel(model)
    with (
        pytest.raises(SystemExit),
        Loop(Runtime(Group(), Group()), tmp_path, model, optimizer) as it,
    ):
        for name, thing in {"scheduler": scheduler, "ema": ema, "epoch": each_epoch}.items():
            it.register(name, thing)
        for _, batches in it.epochs(TensorDataset(torch.randn(24, 2)), batch=6, epochs=2):
            for (batch,) in batches:
                model(batch).sum().backward()
                optimizer.step()
                if it.step_number == 6 and leave == "after the step":
                    raise SystemExit
                scheduler.step()
                ema.update_parameters(model)
                if it.step_number == 6:
                    raise SystemExit
            each_epoch.step()
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["step-000000006.safetensors"]
    lines = [line for line in caplog.messages if "the loop was left in step 6" in line]
    assert [told in line for line in lines] == [True] * bool(told)
