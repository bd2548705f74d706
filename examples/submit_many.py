"""Compare learning rates: submit a run for each from Python, wait, and print the losses.

    hpc-train prepare text /usr/lib/python3 --out data     # or any texts of your own
    python submit_many.py --scheduler local                # or slurm, pbs, lsf, flux

Each run is a batch job like those of `hpc-train submit`. It stops and resumes as they do.
"""

import argparse
import json
from pathlib import Path

from hpc_train import jobs

CONFIG = """
run: {dir: runs/rates, steps: 20}
model: {layers: 2, hidden: 64, heads: 2, sequence: 64}
data: {path: data, batch: 8}
"""
RATES = [1e-4, 1e-3, 1e-2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", help="by default the one of this machine")
    parser.add_argument("--ranks_per_node", type=int, default=1)
    options = vars(parser.parse_args())
    Path("rates.yaml").write_text(CONFIG)

    runs = jobs.map("rates.yaml", [{"optimizer.lr": rate} for rate in RATES], **options)
    for rate, run in zip(RATES, runs, strict=True):
        code = run.wait(poll=1)
        if code:
            raise SystemExit(f"rate {rate:g} has ended with exit code {code}:\n{run.logs()}")
        last = (run.run_dir / "metrics.jsonl").read_text().splitlines()[-1]
        print(f"rate {rate:g}: loss {json.loads(last)['loss']:.4f} ({run.state})")


if __name__ == "__main__":
    main()
