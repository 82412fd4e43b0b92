"""Small fleets: sets of up to five pipelines, all of them compared, each with the gradient sync of its own number and
node types.

The integer program knows sync only as a limit on stages; with few pipelines their number changes it most, so here
every set is
tried. With K real-valued a set's step time has a closed form: all pipelines end together when
T = (B - sum b + sum b fill / bottleneck) / sum (b / bottleneck).
"""

from collections.abc import Callable, Iterator

import numpy as np

from planner.search.tables import Floats, Ints, SyncShape, Tables
from planner.strategies.exact import Pipelines

_WIDTH = {1: 400, 2: 140, 3: 40, 4: 20, 5: 14}


def best_sets(
    tables: Tables, pool: Pipelines, supply: Ints, batch: int, keep: int, holders: int = 1
) -> list[tuple[int, ...]]:
    """The `keep` sets (indices into `pool`, repeated for equal pipelines) with the least estimated step time, of those whose layers may
    each lie on so many nodes."""
    found: list[tuple[float, tuple[int, ...]]] = []
    nodes = _nodes_of_a_layer(tables, pool)
    for number in _WIDTH:
        sets = _sets(pool, supply, batch, number)
        if len(sets) == 0:
            continue
        seconds = _step_times(tables, pool, sets, batch)
        if holders > 1:
            seconds[nodes(sets) < holders] = np.inf
        order = np.argsort(seconds, kind="stable")[:keep]
        found += [(float(seconds[i]), tuple(int(x) for x in sets[i])) for i in order if np.isfinite(seconds[i])]
    return [chosen for _, chosen in sorted(found)[:keep]]


def _sets(pool: Pipelines, supply: Ints, batch: int, number: int) -> Ints:
    """(n, number) sets that fit the supply, out of the fastest pipeline of each use of GPUs."""
    share = batch / number / pool.microbatch
    seconds = pool.fill_s + np.maximum(share - 1, 0) * pool.bottleneck_s
    keys = np.concatenate([pool.usage, pool.microbatch[:, None]], axis=1)
    order = np.lexsort((np.arange(len(pool)), seconds))
    _, first = np.unique(keys[order], axis=0, return_index=True)
    width = min(_WIDTH[number], len(first))
    speed = (pool.usage[order[first]] * 1.0).sum(axis=1) * seconds[order[first]]
    chosen = np.sort(order[first[np.argsort(speed, kind="stable")[:width]]])
    sets = chosen[_combinations(len(chosen), number)]
    fits = (pool.usage[sets].sum(axis=1) <= supply).all(axis=1)
    enough = pool.microbatch[sets].sum(axis=1) <= batch
    return np.asarray(sets[fits & enough], dtype=np.int64)


def _combinations(of: int, number: int) -> Ints:
    """(n, number) indices below `of`, none less than the one before it."""
    found = np.arange(of)[:, None]
    for _ in range(number - 1):
        times = of - found[:, -1]
        first = np.repeat(np.cumsum(times) - times, times)
        found = np.repeat(found, times, axis=0)
        found = np.concatenate([found, (found[:, -1] + np.arange(len(found)) - first)[:, None]], axis=1)
    return found


def _nodes_of_a_layer(tables: Tables, pool: Pipelines) -> Callable[[Ints], Ints]:
    """Of sets the most nodes that the layer with fewest can lie on."""
    resource = np.array([tables.kinds[row.kind].resource for row in tables.rows])
    before = (pool.rows >= 0)[:, None] & (pool.ends[:, None] <= np.arange(tables.num_layers)[:, None])
    held = np.take_along_axis(resource[pool.rows], before.sum(axis=2), axis=1)  # (pipelines, layers)

    def nodes(sets: Ints) -> Ints:
        groups = ((held[sets] == r).sum(axis=1) for r in range(len(tables.resources)))
        most = (np.minimum(n, len(r.node_names)) for n, r in zip(groups, tables.resources, strict=True))
        return np.asarray(np.sum(list(most), axis=0).min(axis=1), dtype=np.int64)

    return nodes


def _step_times(tables: Tables, pool: Pipelines, sets: Ints, batch: int) -> Floats:
    size, step, fill = pool.microbatch[sets].astype(float), pool.bottleneck_s[sets], pool.fill_s[sets]
    rate = (size / step).sum(axis=1)
    seconds = (batch - size.sum(axis=1) + (size * fill / step).sum(axis=1)) / rate
    seconds = np.maximum(seconds, fill.max(axis=1))
    used = (pool.usage[sets].sum(axis=1) > 0).astype(np.int64)
    mask = used @ (2 ** np.arange(used.shape[1]))
    worker = pool.worker_bytes[sets].max(axis=1)
    stage = pool.stage_bytes[sets].max(axis=1)
    least = pool.least_tp[sets].min(axis=1)
    known: dict[tuple[float, float, int, int], float] = {}
    for i, key in enumerate(zip(worker.tolist(), stage.tolist(), least.tolist(), mask.tolist(), strict=True)):
        if key not in known:
            resources = tuple(_bits(key[3]))
            known[key] = tables.sync_s(SyncShape(key[0], key[1], int(key[2]), sets.shape[1], resources))
        seconds[i] += known[key]
    return np.asarray(seconds, dtype=np.float64)


def _bits(mask: int) -> Iterator[int]:
    index = 0
    while mask:
        if mask & 1:
            yield index
        mask >>= 1
        index += 1
