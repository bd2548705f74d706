"""Started by launchers for a rank, by `python -S -E`, which takes a tenth of the usual time.

python -S -E __main__.py (-m MODULE | SCRIPT) ARGUMENT...
"""

import os
import sys

if not __package__:  # by its path, as launchers do: without site-packages this package is not found
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from hpc_train.warm.stand_in import main

sys.exit(main())
