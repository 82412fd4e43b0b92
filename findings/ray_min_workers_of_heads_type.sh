#!/usr/bin/env bash
# Software: ray 2.60.0
# Expected: `min_workers` of a node type is the number of workers of it that stand beside the head,
#   whichever version of the autoscaler runs (RAY_enable_autoscaler_v2): "the minimum number of
#   workers to maintain for this node type" (cluster YAML reference).
# Seen: for the type that is the head's, version 1 counts one more for the head and launches
#   min_workers nodes beside it. Version 2 counts the head itself towards the minimum, and launches
#   one node less: none for min_workers 1. For max_workers both count the head in addition.
# Output:
#   workers of the head's type for min_workers 0, 1, 2: version 1: [0, 1, 2], version 2: [0, 0, 1]
#   workers of another type for min_workers 0, 1, 2: version 1: [0, 1, 2], version 2: [0, 1, 2]
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile "ray[default]==2.60.0"

cat >"$work/finding.py" <<'PY'
import logging
from functools import partial

from ray.autoscaler._private import resource_demand_scheduler as first
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.core.generated import instance_manager_pb2 as pb2

logging.disable(logging.CRITICAL)


def launches(head, number):
    """The workers of `gpu` that each version launches beside a head of type `head`."""
    types = {"gpu": {"min_workers": number}, "cpu": {"max_workers": 0}}
    for kind in types.values():
        kind |= {"node_config": {}, "resources": {"CPU": 8}}
        kind.setdefault("max_workers", 4)
    document = {
        "cluster_name": "c",
        "max_workers": 4,
        "provider": {"type": "aws", "region": "us-east-1"},
        "head_node_type": head,
        "available_node_types": types,
    }
    document = prepare_config(document)
    types = document["available_node_types"]
    scorer = partial(first._default_utilization_scorer, node_availability_summary=None)
    there = {head: 1}
    _, _, of_first = first._add_min_workers_nodes([{"CPU": 8}], there, types, 4, head, [], scorer)

    config = AutoscalingConfig(document, skip_content_hash=True)
    node = pb2.Instance(
        instance_id="head",
        instance_type=head,
        status=pb2.Instance.ALLOCATED,
        node_kind=pb2.NodeKind.HEAD,
    )
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        current_instances=[AutoscalerInstance(im_instance=node)],
    )
    launched = ResourceDemandScheduler().schedule(request).to_launch
    of_second = {each.instance_type: each.count for each in launched}
    return of_first.get("gpu", 0), of_second.get("gpu", 0)


found = {}
for head, words in (("gpu", "the head's"), ("cpu", "another")):
    pairs = [launches(head, number) for number in (0, 1, 2)]
    found[head] = [list(each) for each in zip(*pairs)]
    one, two = found[head]
    print(f"workers of {words} type for min_workers 0, 1, 2: version 1: {one}, version 2: {two}")
assert found == {"gpu": [[0, 1, 2], [0, 0, 1]], "cpu": [[0, 1, 2], [0, 1, 2]]}
PY
"$work/venv/bin/python" "$work/finding.py"
