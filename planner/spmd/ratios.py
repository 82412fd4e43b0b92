"""Shares of the devices: in closed form, and by linear program."""

from collections.abc import Sequence

import numpy as np

from planner.cluster import GIB
from planner.errors import ConfigError, InfeasibleError
from planner.spmd.costs import CostTable, Floats, Shares, Wire, Work
from planner.spmd.program import Program


def closed_form(speeds: Sequence[float]) -> list[tuple[float, ...]]:
    """Return the ratios that can be optimal with one segment, no launches and no memory limit.

    The ratio B_j is in proportion to min(r, f_j), r being a device's speed. Work is then a multiple
    of max_j B_j / f_j, and padded communication a multiple of max_j B_j. The slowest r gives even
    ratios, the fastest gives ratios in proportion to speed.
    """
    found = []
    for r in sorted(set(speeds)):
        limited = [min(r, f) for f in speeds]
        found.append(tuple(x / sum(limited) for x in limited))
    return found


def check_ratios(ratios: Sequence[Sequence[float]], workers: int, what: str) -> None:
    """ConfigError unless they are one or two rows of shares."""
    if len(ratios) not in (1, 2) or any(
        len(row) != workers or min(row) < 0 or not np.isclose(sum(row), 1.0) for row in ratios
    ):
        raise ConfigError(
            f"ratios of {what} must be one or two rows of {workers} shares, one a worker, none"
            " below 0, with the sum 1"
        )


def check_rounded(
    ratios: Sequence[Sequence[float]], units: Sequence[Sequence[int]], names: Sequence[str]
) -> None:
    """ConfigError where the ratio of a worker (by name) is not 0, but gives it none of the units
    that are divided (a row an axis).
    """
    for rank, name in enumerate(names):
        share = max(row[rank] for row in ratios)
        if units and share > 0 and not any(row[rank] for row in units):
            most = max(map(sum, units))
            raise ConfigError(
                f"the ratio {share:g} of '{name}' rounds to nothing: what is divided has at most"
                f" {most} units; leave it out, or give it at least {1 / most:g}"
            )


def linear_program(
    table: CostTable, program: Program, shares: Shares
) -> tuple[tuple[float, ...], ...]:
    """The ratios, a tuple for each segment of `shares`, with the least seconds of a program; memory
    of each device kept (HiGHS).

    Variables: the ratios, one for each segment and device, and the seconds of each sort of term.
    InfeasibleError where the program fits no ratios.
    """
    from scipy.optimize import (
        linprog,
    )  # a fifth of a second, which other strategies need not wait for
    from scipy.sparse import csr_array

    grouped = _grouped(table, program, shares)
    if not grouped:
        return shares.ratios
    n = table.num_devices
    segments = len(shares.ratios)
    blocks = list[Floats]()
    bounds = list[Floats]()
    for number, (work, used) in enumerate(grouped):
        fixed, whole = (np.zeros(n), np.ones(n)) if work is None else table.line(work)
        for segment in used:
            blocks.append(np.zeros((n, segments * n + len(grouped))))
            blocks[-1][:, segment * n : (segment + 1) * n] = np.diag(whole)
            blocks[-1][:, segments * n + number] = -1.0
            bounds.append(-fixed)
    kept, shared = _memory(table, program, shares)
    finite = np.isfinite(table.limits)
    blocks.append(
        np.hstack([np.eye(n) * size / GIB for size in shared] + [np.zeros((n, len(grouped)))])[
            finite
        ]
    )
    bounds.append(((table.limits - kept) / GIB)[finite])
    objective = np.concatenate([np.zeros(segments * n), list(grouped.values())])
    sums = np.hstack([np.kron(np.eye(segments), np.ones(n)), np.zeros((segments, len(grouped)))])
    limits = csr_array(np.vstack(blocks)), np.concatenate(bounds)
    answer = linprog(objective, *limits, csr_array(sums), np.ones(segments), method="highs")
    if answer.status != 0:
        raise InfeasibleError(
            f"no ratios let this program fit the devices' memory ({answer.message.splitlines()[0]})"
        )
    ratios = np.maximum(answer.x[: segments * n].reshape(segments, n), 0.0)
    return normalised_rows(ratios)


def normalised_rows(rows: Floats) -> tuple[tuple[float, ...], ...]:
    """Return the rows, each divided by its sum."""
    found = []
    for row in rows:
        found.append(tuple((row / row.sum()).tolist()))
    return tuple(found)


def _grouped(
    table: CostTable, program: Program, shares: Shares
) -> dict[tuple[Work | None, tuple[int, ...]], float]:
    """Terms that depend on the ratios, alike ones together:

    (work, or None for wires; segments) -> how often, or wires' seconds.
    """
    found: dict[tuple[Work | None, tuple[int, ...]], float] = {}
    for term, count in table.counted(program).items():
        axes = term.axes if isinstance(term, Wire) else (term.axis,)
        used = tuple(sorted({shares.segment(axis) for axis in axes if axis is not None}))
        if used:
            key = (None if isinstance(term, Wire) else term), used
            found[key] = found.get(key, 0.0) + count * (
                term.scaled_s if isinstance(term, Wire) else 1.0
            )
    return found


def _memory(table: CostTable, program: Program, shares: Shares) -> tuple[float, Floats]:
    """Bytes that every device holds, and those of each segment of which it holds its share."""
    whole = 0.0
    shared = np.zeros(len(shares.ratios))
    for instruction in program.instructions:
        axis, size = table.bytes_of(instruction)
        if axis is None:
            whole += size
        else:
            shared[shares.segment(axis)] += size
    return whole, shared
