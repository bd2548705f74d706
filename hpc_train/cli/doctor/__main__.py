"""`python -m hpc_train.cli.doctor` is the rank that `doctor` starts outside of a job."""

from __future__ import annotations

import json

from hpc_train.cli.doctor.probe import probe

if __name__ == "__main__":
    print(json.dumps(probe()))
