"""Fully sharded data parallelism (FSDP, Zhao et al. 2023).

Each worker keeps its part of every weight, gradient and moment. A layer's weights are gathered
before its forward and its backward, and its gradients are reduced to their owners. Both run beside
the work on its neighbours.
"""

from collections.abc import Sequence

from planner.plans.model_spec import LayerSpec

GATHERED_LAYERS = 2
"""Layers whose weights are whole at one time: the one that computes and the next, prefetched."""
HIDDEN_SHARE = 0.5
"""Share of the communication beside work that still costs time.

Collectives take processors and memory bandwidth from the work.
"""


def gathered_scalars(layers: Sequence[LayerSpec], tp_degree: int) -> float:
    """Return the scalars of gathered weights and of one layer's gradient on a worker.

    The weights are those of the layers gathered at one time. Frozen ones are gathered as well, but
    have no gradient.
    """
    weights = []
    largest_gradient = 0.0
    for layer in layers:
        trained = layer.parameters_per_worker(tp_degree)
        weights.append(trained + layer.frozen_per_worker(tp_degree))
        largest_gradient = max(largest_gradient, trained)

    weights.sort(reverse=True)
    return sum(weights[:GATHERED_LAYERS]) + largest_gradient


def overlapped_s(
    forward_s: float, backward_s: float, all_reduce_s: float, num_layers: int
) -> tuple[float, float]:
    """Return forward and backward seconds of one microbatch in one stage.

    all_reduce_s: seconds of the all-reduce of all its layers, alone. Gathering weights takes half
    of it, reducing gradients the other half. The first layer's gathering and the last one's
    reduction have no work beside them. The rest delays by HIDDEN_SHARE, and if it takes longer than
    the work.
    """
    exposed = HIDDEN_SHARE + (1.0 - HIDDEN_SHARE) / max(1, num_layers)
    forward_s = max(forward_s + exposed * all_reduce_s / 2, all_reduce_s / 2)
    backward_s = max(backward_s + exposed * all_reduce_s, all_reduce_s)
    return forward_s, backward_s
