"""How far will a disease progress? A regression on a table of scikit-learn, with a pipeline.

Run python examples/diabetes.py, or mpirun -np 2 python examples/diabetes.py. It compares the model
with a linear one by cross-validation. Then it fits a model in a run directory: a program that is
killed meanwhile continues there when it is started again.
"""

import sys

from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from sklearn.model_selection import cross_val_score, train_test_split

from hpc_train.tabular import Regressor

X, y = load_diabetes(return_X_y=True, as_frame=True)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else None
candidates = {
    "linear model": Ridge(alpha=0.1),
    "neural network": Regressor("resnet", steps=steps, lr=0.0003),
}
for name, model in candidates.items():
    scores = cross_val_score(model, X, y, cv=3)
    print(f"{name}: R2 {scores.mean():.3f}")

training, held_out, values, expected = train_test_split(X, y, random_state=0)
model = Regressor("resnet", steps=steps, lr=0.0003, run_dir="runs/diabetes").fit(training, values)
best = min(one["validation_loss"] for one in model.history_ if "validation_loss" in one)
print(f"lowest validation loss: {best:.3f}")
print(f"R2 on held-out patients: {model.score(held_out, expected):.3f}")
