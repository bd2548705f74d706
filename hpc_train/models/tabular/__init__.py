"""Models of tables: rows of numbers and categories in, predictions out.

sizes.py       the sizes that a model takes from a table, without torch
shape.py       the three kinds' sizes and costs, without torch
embeddings.py  features as vectors
members.py     the parts that differ between the members of an ensemble
module.py      the three models
transfer.py    weights of a model of another table, feature by feature
"""
