"""At least what gradient sync adds to the pipelines of listed columns, for the bound over them."""

from dataclasses import dataclass

import numpy as np

from planner.search.tables import Floats, Ints, Tables
from planner.strategies.columns import Columns

_GRID = 33
_PARTS = 8


def least_sync_s(tables: Tables, columns: Columns, pipelines: int) -> Floats:
    """(n,) what each column adds to its pipeline at least, when at least so many pipelines share the model.

    The first stage ends last and holds the embedding and a block at least. The fullest worker holds an equal share at least, but its
    stage ends earlier than the first by the backwards before it: at most the fill less its forwards and less that stage's backward.
    NICs cannot begin with the first layers of the model, up to one of them, before the stage of that one has ended. Where stages work
    ahead, early ones may have many backwards left when late ones end: there only the first stage counts, and `LateSync` the others.
    """
    fullest = _fullest_s(tables, columns, pipelines)
    if not tables.overlaps_warmup:
        return np.maximum(fullest, tables.least_nics_s(_model_bytes(tables, tables.num_layers), pipelines))
    rows, back = tables.rows, tables.time_sums - tables.forward_sums
    first = np.array([row.sync_bytes[0] + row.sync_bytes[1:-1].min() for row in rows])
    share = min(float((row.forward_s / np.maximum(row.forward_s + row.backward_s, 1e-30)).min()) for row in rows)
    block = columns.least(np.array([row.backward_s[1:-1].min() for row in rows]))
    head = columns.least(back[:, -1] - back[:, -2])
    backwards = (1.0 - share) * columns.fill_s if tables.begun_ahead == 1 else np.inf
    early = np.where(columns.num_stages > 1, backwards, 0.0)
    least = np.maximum(columns.least(_rings_s(tables, first, pipelines)), fullest - np.maximum(early - block, 0.0))
    for layers in np.unique([*np.linspace(2, tables.num_layers - 1, _PARTS).astype(int), tables.num_layers]).tolist():
        nics = tables.least_nics_s(_model_bytes(tables, layers), pipelines)
        behind = (tables.num_layers - layers) * block + head  # backwards from the last of these layers on
        least = np.maximum(least, nics - np.maximum(early - behind, 0.0))
    return least


@dataclass(frozen=True)
class LateSync:
    """What holds of columns however far their stages work ahead. No gradient is summed before the last stage has done its last backward,
    since every other stage of its pipeline is done after that, and every sum has a member in each pipeline: T >= K last_s + sync_s, (n,) of
    each column, where the last stage has a block and the head at least."""

    last_s: Floats
    sync_s: Floats

    def microbatches_in(self, seconds: float, of: Ints) -> Floats:
        """Of these columns, upper bounds."""
        return np.asarray(np.maximum(np.floor((seconds - self.sync_s[of]) / self.last_s[of] + 1e-9), 0.0))


def late_sync(tables: Tables, columns: Columns, pipelines: int) -> LateSync:
    """At least so many pipelines share the model."""
    whole, n = tables.time_sums, tables.num_layers
    last = [
        float((r.forward_s + r.backward_s)[1:-1].min()) + float(w[n] - w[n - 1]) for r, w in zip(tables.rows, whole)
    ]
    nics = tables.least_nics_s(_model_bytes(tables, n), pipelines)
    return LateSync(columns.least(np.array(last)), np.maximum(_fullest_s(tables, columns, pipelines), nics))


def _fullest_s(tables: Tables, columns: Columns, pipelines: int) -> Floats:
    """(n,) least seconds of sync and update of a worker with `columns.sync_bytes`, rounded down to a grid."""
    steps = np.linspace(0.0, float(columns.sync_bytes.max()), _GRID)
    at = np.clip(np.searchsorted(steps, columns.sync_bytes, side="right") - 1, 0, _GRID - 1)
    rings = np.array(
        [[tables.least_ring_s(kind.resource, size, kind.tp_degree, pipelines) for size in steps.tolist()] for kind in tables.kinds]
    )  # fmt: skip
    kinds = np.array([row.kind for row in tables.rows])[columns.rows]
    found = np.where(columns.rows >= 0, rings[kinds, at[:, None]], np.inf)
    return np.asarray(found.min(axis=1))


def _rings_s(tables: Tables, num_bytes: Floats, pipelines: int) -> Floats:
    """(rows,) least seconds of sync and update of a worker of each row with so many gradient bytes."""
    kinds = [tables.kinds[row.kind] for row in tables.rows]
    keys = [(kind.resource, float(size), kind.tp_degree) for kind, size in zip(kinds, num_bytes, strict=True)]
    known = {key: tables.least_ring_s(*key, pipelines) for key in set(keys)}
    return np.array([known[key] for key in keys])


def _model_bytes(tables: Tables, layers: int) -> float:
    """Gradient bytes of the first layers, whole."""
    return tables.kinds[tables.rows[0].kind].tp_degree * tables.stage_sync_bytes(0, 0, layers)
