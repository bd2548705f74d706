"""The configuration of a training.

sections.py  one frozen dataclass per section, which checks its own values
file.py      from a YAML file and dotted options to the sections
"""

from hpc_train.config.sections import CheckpointSection as CheckpointSection
from hpc_train.config.sections import DataSection as DataSection
from hpc_train.config.sections import GradientsSection as GradientsSection
from hpc_train.config.sections import MemorySection as MemorySection
from hpc_train.config.sections import ModelSection as ModelSection
from hpc_train.config.sections import OptimizerSection as OptimizerSection
from hpc_train.config.sections import ParallelSection as ParallelSection
from hpc_train.config.sections import PrecisionSection as PrecisionSection
from hpc_train.config.sections import RunConfig as RunConfig
from hpc_train.config.sections import RunSection as RunSection
