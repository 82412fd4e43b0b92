"""Shares of the devices: in closed form, and by linear program."""

from collections.abc import Sequence

import numpy as np

from planner.arrays import Floats
from planner.errors import ConfigError, InfeasibleError
from planner.inputs.cluster import GIB
from planner.spmd.costs import CostTable, Shares, Wire, Work
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
        total = sum(limited)
        found.append(tuple(x / total for x in limited))
    return found


def check_ratios(ratios: Sequence[Sequence[float]], workers: int, what: str) -> None:
    """Check that ratios are one or two rows of shares.

    Raises:
        ConfigError: they are not.
    """
    is_valid = len(ratios) in (1, 2)
    for row in ratios:
        are_shares = len(row) == workers and min(row) >= 0
        if not are_shares or not np.isclose(sum(row), 1.0):
            is_valid = False
    if not is_valid:
        raise ConfigError(
            f"ratios of {what} must be one or two rows of {workers} shares, one a worker, none"
            " below 0, with the sum 1"
        )


def check_rounded(
    ratios: Sequence[Sequence[float]], units: Sequence[Sequence[int]], names: Sequence[str]
) -> None:
    """Check that each worker whose ratio is not 0 gets some units.

    units: those of each worker, a row for each axis that is cut. names: the workers.

    Raises:
        ConfigError: a worker gets none.
    """
    if not units:
        return
    for rank, name in enumerate(names):
        share = max(row[rank] for row in ratios)
        has_units = any(row[rank] for row in units)
        if share > 0 and not has_units:
            most = max(map(sum, units))
            raise ConfigError(
                f"the ratio {share:g} of '{name}' rounds to nothing: what is divided has at most"
                f" {most} units; leave it out, or give it at least {1 / most:g}"
            )


def linear_program(
    table: CostTable, program: Program, shares: Shares
) -> tuple[tuple[float, ...], ...]:
    """Return the ratios with the least seconds of a program, a tuple for each segment of `shares`.

    The memory limit of each device is kept. The solver is HiGHS.

    Raises:
        InfeasibleError: the program fits no ratios.
    """
    # Other strategies do not use scipy's solvers, whose import takes a fifth of a second.
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    grouped = _group_terms(table, program, shares)
    if not grouped:
        return shares.ratios
    n = table.num_devices
    segments = len(shares.ratios)

    # Variables: the ratios by segment and device, then the seconds of each group of terms.
    num_ratios = segments * n
    num_variables = num_ratios + len(grouped)
    blocks = list[Floats]()
    bounds = list[Floats]()
    for number, (work, used) in enumerate(grouped):
        if work is None:
            fixed = np.zeros(n)
            whole = np.ones(n)
        else:
            fixed, whole = table.line(work)
        # fixed + ratio * whole <= the group's seconds, on each device
        group = num_ratios + number
        for segment in used:
            ratios_of_segment = slice(segment * n, (segment + 1) * n)
            block = np.zeros((n, num_variables))
            block[:, ratios_of_segment] = np.diag(whole)
            block[:, group] = -1.0
            blocks.append(block)
            bounds.append(-fixed)

    # kept + ratio * shared <= the limit, on each device; in GiB, as solvers want numbers near 1
    kept, shared = _memory(table, program, shares)
    is_limited = np.isfinite(table.limits)
    block = np.zeros((n, num_variables))
    for segment, size in enumerate(shared):
        ratios_of_segment = slice(segment * n, (segment + 1) * n)
        block[:, ratios_of_segment] = np.eye(n) * size / GIB
    room = (table.limits - kept) / GIB
    blocks.append(block[is_limited])
    bounds.append(room[is_limited])

    weights = list(grouped.values())
    objective = np.concatenate([np.zeros(num_ratios), weights])
    # the ratios of each segment sum to 1
    sums = np.zeros((segments, num_variables))
    sums[:, :num_ratios] = np.kron(np.eye(segments), np.ones(n))
    answer = linprog(
        objective,
        A_ub=csr_array(np.vstack(blocks)),
        b_ub=np.concatenate(bounds),
        A_eq=csr_array(sums),
        b_eq=np.ones(segments),
        method="highs",
    )
    if answer.status != 0:
        reason = answer.message.splitlines()[0]
        raise InfeasibleError(f"no ratios let this program fit the devices' memory ({reason})")
    # the solver may return a ratio slightly below 0
    ratios = answer.x[:num_ratios].reshape(segments, n)
    return normalise_rows(np.maximum(ratios, 0.0))


def normalise_rows(rows: Floats) -> tuple[tuple[float, ...], ...]:
    """Return the rows, each divided by its sum."""
    found = []
    for row in rows:
        normalised = row / row.sum()
        found.append(tuple(normalised.tolist()))
    return tuple(found)


def _group_terms(
    table: CostTable, program: Program, shares: Shares
) -> dict[tuple[Work | None, tuple[int, ...]], float]:
    """Group the terms that depend on the ratios.

    Keys are the work, or None for communication, and the segments of its axes. Values are how often
    the work occurs, or the seconds of a whole tensor's communication.
    """
    found: dict[tuple[Work | None, tuple[int, ...]], float] = {}
    for term, count in table.term_counts(program).items():
        work: Work | None
        if isinstance(term, Wire):
            work = None
            axes = term.axes
            weight = term.scaled_s
        elif term.axis is None:
            # every device does all of it, whatever the ratios
            continue
        else:
            work = term
            axes = (term.axis,)
            weight = 1.0
        segments = {shares.segment(axis) for axis in axes}
        if segments:
            key = (work, tuple(sorted(segments)))
            before = found.get(key, 0.0)
            found[key] = before + count * weight
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
