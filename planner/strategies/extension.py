"""Keeping pipelines as they are and making new ones of the GPUs that are left over: the quick part of replanning."""

from planner.plan import Pipeline, Plan
from planner.search.cost_tables import tables_of
from planner.search.draft import Draft, Estimator, assign_microbatches
from planner.search.place import place
from planner.search.problem import Request
from planner.search.tables import Tables
from planner.strategies.effort import Effort
from planner.strategies.engine import Engine
from planner.strategies.symmetric import draft_of

_EFFORT = Effort(
    columns=10_000, exact=150, packed=50, orders=2, levels=1, candidates=1, integer_program_nodes=50, bounded=False,
)  # fmt: skip


def extend(kept: Plan | None, request: Request) -> list[Plan]:
    """Plans that keep `kept`'s pipelines where they are and add pipelines of free GPUs; empty where there is nothing
    to add.
    """
    if kept is None:
        return []
    used = set(kept.workers)
    free = [worker for worker in request.fleet.workers if worker not in used]
    tables = tables_of(request)
    draft = draft_of(tables, kept, request.fleet)
    if not free or draft is None:
        return []
    supply = [sum(request.fleet.node_of(w).name in set(r.node_names) for w in free) for r in tables.resources]
    share = _missing_batch(kept, request)
    found = Engine(tables, share, request.max_stages or tables.num_blocks, _EFFORT, supply=supply).run()
    joined = (_join(request, tables, kept, draft, added, used) for _, added in found.drafts[:2])
    return [plan for plan in joined if plan is not None]


def _missing_batch(kept: Plan, request: Request) -> int:
    """Sequences that pipelines in proportion to the free GPUs should take, were all GPUs equally fast."""
    everyone = len(request.fleet.workers)
    batch = request.global_batch_sequences
    return max(1, batch * (everyone - len(kept.workers)) // everyone)


def _join(request: Request, tables: Tables, kept: Plan, draft: Draft, added: Draft, used: set[str]) -> Plan | None:
    """Old and new pipelines share the batch anew; the old ones keep their workers."""
    batch = request.global_batch_sequences
    shapes = [shape for shape, _ in (*draft.pipelines, *added.pipelines)]
    whole = assign_microbatches(Estimator(tables), shapes, batch)
    if whole is None:
        return None
    new = Draft(whole.pipelines[len(draft.pipelines) :])
    placed = place(tables, new, kept.model, batch, kept.sequence_length, used)
    if placed is None:
        return None
    counts = [count for _, count in whole.pipelines]
    old = tuple(
        Pipeline(p.stages, count, p.microbatch_sequences) for p, count in zip(kept.pipelines, counts, strict=False)
    )
    return Plan(kept.model, batch, kept.microbatch_sequences, kept.sequence_length, (*old, *placed.pipelines))
