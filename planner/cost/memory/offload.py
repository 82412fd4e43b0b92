"""Seconds of an update in host memory: gradients come down, AdamW runs on the host, weights go up.

The runtime (`autohet.runtime.parallel.host_staging`) updates one part while the next one comes
down. It converts one part of the weights while the one before goes up. Weights go up only after the
whole update, and the device computes nothing meanwhile.
"""

from __future__ import annotations

from planner.cost.parameters import CostParameters
from planner.inputs.catalogue import find_gpu_type
from planner.inputs.fleet import NodeType

UPDATE_BYTES = 32
"""Memory traffic of AdamW for one parameter: fp32 gradient, master and two moments, read and
written.
"""
GRADIENT_BYTES = 4
CORE_BYTES_PER_S = 4.7e9
"""Memory traffic of torch's fused AdamW on one core, measured on an Intel Xeon at 2.5 GHz.

16 cores beside an H200 reach 5.6e9 each (scripts/benchmarks/results/gpu-h200.json).
"""
NODE_BYTES_PER_S = 300e9
"""Memory traffic of all cores of a node at most: an estimate for two sockets, not measured."""


def host_link_bytes_per_s(gpu_type: str, parameters: CostParameters) -> float:
    """Return the bytes a second of one direction between one GPU and pinned host memory."""
    device = find_gpu_type(gpu_type)
    known = None if device is None else device.host_link_bytes_per_s
    return known or parameters.host_link_bytes_per_s


def offloaded_update_s(kind: NodeType, value_bytes: int, parameters: CostParameters) -> float:
    """Return the seconds of one parameter on one GPU of this node type.

    value_bytes: of a weight that is computed with.
    """
    link = host_link_bytes_per_s(kind.gpu_type, parameters)
    if kind.num_gpus > 1:
        # At most what a GPU reaches its neighbours with: on machines without NVLink that is PCIe.
        link = min(link, kind.intra_node_bytes_per_s * parameters.efficiency_intra)
    rate = parameters.host_update_bytes_per_s
    if kind.host_cores is not None:
        # A worker's update uses its share of the node's cores.
        node_rate = min(kind.host_cores * CORE_BYTES_PER_S, NODE_BYTES_PER_S)
        rate = node_rate / max(1, kind.num_gpus)
    down = max(GRADIENT_BYTES / link, UPDATE_BYTES / rate)
    up = max(value_bytes / link, (4 + value_bytes) / rate)
    return down + up
