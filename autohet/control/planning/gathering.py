"""Time that a change waits for further notices, so that one change answers them all.

Pure: computed from notices and from what this run has measured. Nodes of a spot pool are reclaimed
within seconds of each other. Until its deadline a node trains on: waiting costs nothing but risk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autohet.control.planning.orders import URGENT
from autohet.control.planning.outlook import REMEMBERED
from autohet.control.values.change import Change
from autohet.control.values.observation import Notice, Observation
from autohet.runtime.job.elastic import Timeouts
from planner.inputs.cluster import node_of
from recovery.state.layout import Layout


def gathers_until(notices: Sequence[Notice], patience_s: float, needs_s: float) -> float:
    """Return the time at which the change begins, if no other node gets a notice.

    That is `patience_s` after the last notice, and at the latest `needs_s` before the first
    deadline. A node without a deadline may be gone at any time: then there is no wait.
    """
    last_seen_at = max(notice.seen_at for notice in notices)
    first_deadline = math.inf
    for notice in notices:
        if notice.deadline is None:
            first_deadline = -math.inf
        else:
            first_deadline = min(first_deadline, notice.deadline)
    latest = first_deadline - needs_s
    return min(last_seen_at + patience_s, latest)


def needed_s(
    changes: Sequence[Change],
    limits: Timeouts,
    *,
    search_s: float,
    step_s: float,
    state_s: float,
    upload_s: float | None,
) -> float:
    """Return the seconds before the first deadline at which the change must begin.

    The step under way, a search (of at most `search_s`), groups, the first step and the restore (of
    `state_s` at least) take as long as the longest of this run's last changes. Before there was
    one, the start counts, and before that the time limits. All this is to be over in that part of
    the time left in which a restore still takes whatever leavers hold (`URGENT`). If the next
    notice leaves too few nodes to go on, a checkpoint comes in its place: `upload_s` is this run's
    longest upload; None, where there was none, stands for its time limit.
    """
    moves = [change.seconds() for change in changes if change.is_complete_move]
    moves = moves[-REMEMBERED:]
    # The start moves nothing and has no plan before it, but it builds the same groups.
    builds = moves or [change.seconds() for change in changes if change.is_complete]

    if builds:
        times_s = [parts["rebuild"] + parts["first_step"] for parts in builds]
        rebuild_s = max(times_s)
    else:
        rebuild_s = limits.quiesce_s + limits.rendezvous_s
    replan_s = search_s
    if moves:
        replan_s = max(parts["replan"] for parts in moves)
    restore_s = state_s
    for parts in moves:
        restore_s = max(restore_s, parts["restore"])
    change_s = step_s + replan_s + rebuild_s + restore_s

    if upload_s is None:
        upload_s = limits.checkpoint_s
    return change_s / URGENT + upload_s


def slowest_move_s(layout: Layout, seen: Observation) -> float:
    """Return the seconds in which every node could send, or receive, all training state on it."""
    bytes_by_node: Counter[str] = Counter()
    for worker in layout.workers:
        bytes_by_node[node_of(worker)] += layout.bytes_of(worker)

    slowest_s = 0.0
    for name, num_bytes in bytes_by_node.items():
        if name in seen.nodes:
            bytes_per_s = seen.nodes[name].node_type.inter_node_bytes_per_s
            slowest_s = max(slowest_s, num_bytes / bytes_per_s)
    return slowest_s
