"""The fault matrix as data: where, whom, how.

`COVERING`, with restore-node-freeze on a large state, has each point, each scope and each mode in
a minute or two.
"""

from itertools import product

from tests.harness.struck_run import Strike

POINTS = (
    "forward",
    "backward",
    "gradient_sync",
    "vote",
    "apply",
    "mid_update",
    "snapshot",
    "upload",
    "manifest",
    "restore",
    "rebuild",
    "replan",
)
"""vote: gradients summed, nothing said. apply: between a step's commit and its update. mid_update:
between its first tensor and the second. manifest: data is stored, the manifest not yet. replan:
before the planner is asked.
"""
SCOPES = ("worker", "node", "pipeline", "driver")
MODES = ("notice", "kill", "freeze")
DURABLE_STEP = 8
"""Of the points that belong to a checkpoint, and of the snapshot's."""


def strike_of(point: str, scope: str, mode: str) -> Strike:
    """A cell: the points of a reconfiguration come after node d was told to leave."""
    reconfigures = point in ("restore", "rebuild", "replan")
    step = DURABLE_STEP if point in ("snapshot", "upload", "manifest") else 6
    return Strike(point, scope, mode, step, "notice d" if reconfigures else None)


MATRIX = {f"{p}-{s}-{m}": strike_of(p, s, m) for p, s, m in product(POINTS, SCOPES, MODES)} | {
    f"{point}-worker-fail": Strike(point, "worker", "fail")
    for point in ("failed_vote", "failed_update")
}
COVERING = (
    "forward-driver-notice",
    "backward-worker-freeze",
    "gradient_sync-node-notice",
    "vote-worker-freeze",
    "mid_update-worker-kill",
    "failed_update-worker-fail",
    "failed_vote-worker-fail",
    "apply-driver-kill",
    "snapshot-pipeline-notice",
    "upload-driver-freeze",
    "manifest-driver-kill",
    "rebuild-pipeline-kill",
    "replan-node-kill",
)
