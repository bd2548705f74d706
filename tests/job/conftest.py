"""A fixture of the Trainer's tests, for what runs beside training."""

from tests.training.conftest import reference as reference
