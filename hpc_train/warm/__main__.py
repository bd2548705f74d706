"""The program that launchers start for a rank. `python -S -E` starts in a tenth of the usual time.

python -S -E __main__.py (-m MODULE | SCRIPT) ARGUMENT...
"""

import os
import sys

if not __package__:  # launchers start this file by its path, and -S hides site-packages
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from hpc_train.warm.stand_in import main

sys.exit(main())
