"""`python -m hpc_train` is the program `hpc-train`: console scripts may be missing on nodes."""

import sys

from hpc_train.cli import main

sys.exit(main())
