"""Shapes of the models in the bundled measurements (data/profile_models.csv), so that their times
can be scaled to other models.
"""

import csv
from functools import cache
from pathlib import Path

from planner.model_spec import LayerSpec


@cache
def _models() -> dict[str, LayerSpec]:
    path = Path(__file__).parent / "data" / "profile_models.csv"
    with path.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        models = {}
        for row in rows:
            models[row["model"]] = LayerSpec(
                parameters=int(row["parameters_per_layer"]),
                matmul_parameters=int(row["parameters_per_layer"]),
                attention_width=int(row["hidden_size"]),
            )
        return models


def measured_model(name: str) -> LayerSpec | None:
    """Return one block of a model of the bundled measurements; None for other names."""
    return _models().get(name)
