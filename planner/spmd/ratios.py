"""Shares of the devices: in closed form, by linear program, and whole batches from measured curves."""

from collections.abc import Iterator, Sequence

import numpy as np

from planner.cluster import GIB
from planner.errors import ConfigError, InfeasibleError
from planner.spmd.costs import CostTable, Shares, Term, Wire, Work
from planner.spmd.program import Program


def closed_form(speeds: Sequence[float]) -> list[tuple[float, ...]]:
    """All ratios that can be optimal with one segment, no launches and no memory limit: B_j in proportion to min(r, f_j), r a device's
    speed. Work is then a multiple of max_j B_j / f_j and padded communication one of max_j B_j; the slowest r is even, the fastest is in
    proportion to speed."""
    found = []
    for r in sorted(set(speeds)):
        limited = [min(r, f) for f in speeds]
        found.append(tuple(x / sum(limited) for x in limited))
    return found


def check_ratios(ratios: Sequence[Sequence[float]], workers: int, what: str) -> None:
    """ConfigError unless they are one or two rows of shares."""
    if len(ratios) not in (1, 2) or any(len(row) != workers or min(row) < 0 or not np.isclose(sum(row), 1.0) for row in ratios):
        raise ConfigError(f"ratios of {what} must be one or two rows of {workers} shares, one a worker, none below 0, with the sum 1")


def check_rounded(ratios: Sequence[Sequence[float]], units: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """ConfigError where the ratio of a worker (by name) is not 0, but gives it none of the units that are divided (a row an axis)."""
    for rank, name in enumerate(names):
        share = max(row[rank] for row in ratios)
        if units and share > 0 and not any(row[rank] for row in units):
            most = max(map(sum, units))
            raise ConfigError(
                f"the ratio {share:g} of '{name}' rounds to nothing: what is divided has at most {most} units; leave it out, or give it at"
                f" least {1 / most:g}"
            )


def linear_program(table: CostTable, program: Program, shares: Shares) -> tuple[tuple[float, ...], ...]:
    """The ratios, a tuple for each segment of `shares`, with the least seconds of a program; memory of each device kept (HiGHS).

    Variables: the ratios, one for each segment and device, and the seconds of each sort of term. InfeasibleError where the program
    fits no ratios.
    """
    from scipy.optimize import linprog  # a fifth of a second, which other strategies need not wait for
    from scipy.sparse import coo_array

    grouped = _grouped(table, program, shares)
    if not grouped:
        return shares.ratios
    n, segments = table.num_devices, len(shares.ratios)
    entries: list[tuple[int, int, float]] = []
    bounds: list[float] = []
    for number, sort in enumerate(grouped):
        for column, factor, limit in _rows(table, sort):
            entries += [(len(bounds), column, factor), (len(bounds), segments * n + number, -1.0)]
            bounds.append(limit)
    _memory_rows(table, program, shares, entries, bounds)
    size = segments * n + len(grouped)
    objective = np.concatenate([np.zeros(segments * n), list(grouped.values())])
    rows, columns, factors = zip(*entries, strict=True)
    equal = coo_array((np.ones(segments * n), (np.repeat(np.arange(segments), n), np.arange(segments * n))), (segments, size))
    matrix = coo_array((factors, (rows, columns)), (len(bounds), size))
    answer = linprog(objective, matrix.tocsr(), bounds, equal.tocsr(), np.ones(segments), method="highs")
    if answer.status != 0:
        raise InfeasibleError(f"no ratios let this program fit the devices' memory ({answer.message.splitlines()[0]})")
    ratios = np.maximum(answer.x[: segments * n].reshape(segments, n), 0.0)
    return tuple(tuple(float(x) for x in row / row.sum()) for row in ratios)


_Sort = tuple[Work | None, tuple[int, ...]]


def _grouped(table: CostTable, program: Program, shares: Shares) -> dict[_Sort, float]:
    """Terms that depend on the ratios, alike ones together: (work, or None for wires; segments) -> how often, or wires' seconds."""
    found: dict[_Sort, float] = {}
    for term, count in table.counted(program).items():
        used = _segments(term, shares)
        if not used:
            continue
        key: _Sort = (None, used)
        if isinstance(term, Wire):
            scale = term.scaled_s
        elif table.has_work_beside_flops:
            key, scale = (term, used), 1.0
        else:
            key, scale = (Work(None, 1e12, 0.0, 0.0), used), term.flops / 1e12
        found[key] = found.get(key, 0.0) + count * scale
    return found


def _segments(term: Term, shares: Shares) -> tuple[int, ...]:
    axes = (term.axis,) if isinstance(term, Work) else term.axes
    return tuple(sorted({shares.segment(axis) for axis in axes if axis is not None}))


def _rows(table: CostTable, sort: _Sort) -> Iterator[tuple[int, float, float]]:
    """(column, factor, limit): factor times the column is at most the sort's seconds plus the limit."""
    work, used = sort
    n = table.num_devices
    if work is None:
        yield from ((segment * n + j, 1.0, 0.0) for segment in used for j in range(n))
        return
    fixed, whole = table.work_s(work, 0.0), table.work_s(work, 1.0)
    yield from ((used[0] * n + j, float(whole[j] - fixed[j]), -float(fixed[j])) for j in range(n))


def _memory_rows(
    table: CostTable, program: Program, shares: Shares, entries: list[tuple[int, int, float]], bounds: list[float]
) -> None:
    whole, shared = 0.0, np.zeros(len(shares.ratios))
    for instruction in program.instructions:
        axis, size = table.bytes_of(instruction)
        if axis is None:
            whole += size
        else:
            shared[shares.segment(axis)] += size
    for j, limit in enumerate(table.limits):
        if np.isfinite(limit):
            entries += [(len(bounds), s * table.num_devices + j, float(size / GIB)) for s, size in enumerate(shared)]
            bounds.append(float((limit - whole) / GIB))


def min_max_batches(curves: Sequence[Sequence[float]], total: int, multiple: int = 1) -> tuple[int, ...]:
    """Samples of each device so that the slowest ends earliest: curves[j][k] are device j's seconds for k + 1 samples, non-decreasing.
    Beyond a curve's end the device takes further passes of its cheapest size a sample. Bisection on the finishing time."""
    tables = [np.maximum.accumulate(_extended(curve, total)) for curve in curves]

    def counts(limit: float) -> list[int]:
        return [int(np.searchsorted(t, limit * (1 + 1e-12), side="right")) // multiple * multiple for t in tables]

    ends = sorted({float(x) for t in tables for x in t})
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(counts(ends[middle])) >= total else (middle + 1, high)
    found = counts(ends[low])
    if sum(found) < total:
        raise InfeasibleError(f"{total} samples do not come out in multiples of {multiple} on {len(curves)} devices")
    while sum(found) > total:
        latest = max((j for j, k in enumerate(found) if k), key=lambda j: (tables[j][found[j] - 1], j))
        found[latest] -= multiple
    return tuple(found)


def _extended(curve: Sequence[float], total: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds of 1 to `total` samples: in one pass within the curve, beyond it in as many passes as are least."""
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    sizes = np.arange(1, min(len(curve), total) + 1)
    points = np.asarray(curve[: len(sizes)], dtype=np.float64)
    for k in range(1, total + 1):
        usable = sizes <= k
        best[k] = float((best[k - sizes[usable]] + points[usable]).min())
    return best[1:]
