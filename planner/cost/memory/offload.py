"""Seconds of an update in host memory: gradients come down, AdamW runs on the host, weights go up.

The runtime (`autohet.runtime.parallel.host_staging`) updates one part while the next one comes
down. It converts one part of the weights while the one before goes up. Weights go up only after the
whole update, and the device computes nothing meanwhile.
"""

from __future__ import annotations

from planner.cost.parameters import CostParameters
from planner.inputs.fleet import NodeType

UPDATE_BYTES = 32
"""Memory traffic of AdamW for one parameter: fp32 gradient, master and two moments, read and
written.
"""
GRADIENT_BYTES = 4


def offloaded_update_s(kind: NodeType, value_bytes: int, parameters: CostParameters) -> float:
    """Return the seconds of one parameter on one GPU of this node type.

    value_bytes: of a weight that is computed with.
    """
    link = parameters.host_link_bytes_per_s
    if kind.num_gpus > 1:
        # At most what a GPU reaches its neighbours with: on machines without NVLink that is PCIe.
        link = min(link, kind.intra_node_bytes_per_s * parameters.efficiency_intra)
    rate = parameters.host_update_bytes_per_s
    down = max(GRADIENT_BYTES / link, UPDATE_BYTES / rate)
    up = max(value_bytes / link, (4 + value_bytes) / rate)
    return down + up
