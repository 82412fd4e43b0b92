"""Shapes of the models in the bundled measurements (data/profile_models.csv), so that their times
can be scaled to other models.
"""

from functools import cache

from planner.inputs.catalogue import read_rows
from planner.plans.model_spec import LayerSpec


@cache
def _models() -> dict[str, LayerSpec]:
    models = {}
    for row in read_rows("profile_models.csv"):
        num_parameters = int(row["parameters_per_layer"])
        models[row["model"]] = LayerSpec(
            parameters=num_parameters,
            matmul_parameters=num_parameters,
            attention_width=int(row["hidden_size"]),
        )
    return models


def measured_model(name: str) -> LayerSpec | None:
    """Return one block of a model of the bundled measurements; None for other names."""
    return _models().get(name)
