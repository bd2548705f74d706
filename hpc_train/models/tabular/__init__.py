"""Models of tables: rows of numbers and categories in, predictions out.

sizes.py       the sizes that a model takes from a table, without torch
shape.py       the three kinds' sizes and costs, without torch
embeddings.py  features as vectors
members.py     the parts that differ between the members of an ensemble
module.py      what the models share, the MLP ensemble and the residual network
transformer.py the transformer
transfer.py    weights of a model of another table, feature by feature
"""
