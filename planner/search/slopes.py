"""How much longer than the bottleneck early stages may take that work ahead while later ones fill (`planner.in_flight`).

Arrays are (n, P), one entry a pipeline: rows the table row of each stage, -1 beyond the pipeline's end; ends where its layers end.
"""

import numpy as np
from numpy.typing import NDArray

from planner.search.tables import Floats, Ints, Tables


def slopes_of(tables: Tables, rows: Ints, num_stages: Ints, microbatches: Floats) -> Floats:
    """Stage s may take so many times (T - F) / (K - 1): T >= F + (K - 1) t - min(K - 1, n - 1) f, if n microbatches are in flight."""
    share = tables.forward_share[rows]
    hidden = np.minimum(1.0, _ahead(tables, rows, num_stages) / np.maximum(microbatches - 1, 1e-9)[:, None])
    return np.asarray(1.0 / (1.0 - share * hidden))


def memory_holds(tables: Tables, rows: Ints, ends: Ints, num_stages: Ints, microbatches: Floats) -> NDArray[np.bool_]:
    """(n,) whether each stage has memory for the microbatches that it then keeps in flight."""
    limit = np.array([row.limit_bytes - row.fixed_bytes for row in tables.rows])
    starts = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), ends[:, :-1]], axis=1)
    number = np.minimum(_ahead(tables, rows, num_stages) + 1, np.ceil(microbatches)[:, None])
    state, kept = (sums[rows, ends] - sums[rows, starts] for sums in (tables.state_sums, tables.activation_sums))
    return np.asarray(((rows < 0) | (state + number * kept <= limit[rows])).all(axis=1))


def _ahead(tables: Tables, rows: Ints, num_stages: Ints) -> Ints:
    """Microbatches that each stage may begin beside the one that it waits for."""
    return np.asarray(tables.begun_ahead * np.maximum(num_stages[:, None] - 1 - np.arange(rows.shape[1]), 0))
