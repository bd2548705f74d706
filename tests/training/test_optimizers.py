"""Which parameters an optimizer decays."""

from hpc_train.config import OptimizerSection
from hpc_train.models.tabular.module import TabularMlp
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.training.optimizers import build_optimizer


def test_only_matrices_decay_and_no_stacked_vectors_of_members():
    sizes = TableSizes(edges=((0.0, 0.5, 1.0),), codes=(4,), outputs=2)
    model = TabularMlp(sizes=sizes, layers=1, hidden=8, embedding_width=4, members=3)
    names = {id(one): name for name, one in model.named_parameters()}
    groups = build_optimizer(model, OptimizerSection(weight_decay=0.1)).param_groups
    decayed = {names[id(p)] for one in groups for p in one["params"] if one["weight_decay"]}
    assert decayed == {
        "embedding.row.features.numeric.weight",
        "embedding.row.features.numeric.slope",
        "embedding.row.features.categorical.table.weight",
        "embedding.row.project.weight",
        "blocks.0.up.weight",
        "blocks.0.down.weight",
        "head.weight",
    }
    assert sum(len(one["params"]) for one in groups) == len(names)
