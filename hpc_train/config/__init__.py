"""The configuration of a run.

sections.py   one frozen dataclass per section, which checks its own values
spread.py     the sections that say how a job is spread over its ranks
model.py      the section of the model: the keys of each kind, and their defaults
finetune.py   the section that says which parameters of a trained model are trained further
profile.py    the keys that say which steps of a run are profiled
mixture.py    checks a list of folders with weights
together.py   checks that the values of several sections go together
file.py       makes the sections from a YAML file and dotted options
help.py       the help of the keys, in plain words
keys.py       reads a YAML file and checks its keys; also for machines and sites
durations.py  reads and writes time spans
"""

from hpc_train.config.finetune import FinetuneSection as FinetuneSection
from hpc_train.config.model import ModelSection as ModelSection
from hpc_train.config.profile import ProfileSection as ProfileSection
from hpc_train.config.sections import CheckpointSection as CheckpointSection
from hpc_train.config.sections import DataSection as DataSection
from hpc_train.config.sections import OptimizerSection as OptimizerSection
from hpc_train.config.sections import PrecisionSection as PrecisionSection
from hpc_train.config.sections import RunConfig as RunConfig
from hpc_train.config.sections import RunSection as RunSection
from hpc_train.config.spread import GradientsSection as GradientsSection
from hpc_train.config.spread import MemorySection as MemorySection
from hpc_train.config.spread import ParallelSection as ParallelSection
