"""Planner: from a fleet, a model and measured layer times to the plan with the best predicted step.

See README.md.
"""

from planner.errors import ConfigError, InfeasibleError
from planner.inputs.cluster import (
    Cluster,
    Fleet,
    Node,
    NodeType,
    cluster_from_document,
    cluster_from_yaml,
    node_type_from_labels,
)
from planner.plans.model_spec import LayerSpec, ModelSpec
from planner.plans.plan import Pipeline, Plan, Recompute, Stage, check_plan

__all__ = [
    "Cluster",
    "ConfigError",
    "Fleet",
    "InfeasibleError",
    "LayerSpec",
    "ModelSpec",
    "Node",
    "NodeType",
    "Pipeline",
    "Plan",
    "Recompute",
    "Stage",
    "check_plan",
    "cluster_from_document",
    "cluster_from_yaml",
    "node_type_from_labels",
]
