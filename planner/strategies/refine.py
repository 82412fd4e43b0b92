"""Local search on a draft under the 1F1B simulation: one block or one stage to its neighbour's place, one microbatch
to another pipeline.
"""

import itertools
from collections.abc import Callable, Iterable

from planner.strategies.drafts import Draft, Estimator, Shape, assign_microbatches

_ROUNDS = 12
_SIMULATED = 3
FAR_BEHIND = 1.15  # what is slower than the best by more is not made better by single moves

After = Callable[[Shape], float]  # seconds from a pipeline's end to that of its gradients' sums


def nothing_after(shape: Shape) -> float:
    """Where the sync is not known, or is the same for all."""
    return 0.0


def refine(estimator: Estimator, draft: Draft, batch: int) -> Draft:
    """A draft that is at least as good by the estimator; pipelines of equal shape are moved together."""
    best, seconds = draft, estimator.draft_s(draft)
    for _ in range(3):
        better = {shape: refine_shape(estimator, shape, k) for shape, k in dict(best.pipelines).items()}
        moved = assign_microbatches(estimator, [better[shape] for shape, _ in best.pipelines], batch)
        if moved is None or estimator.draft_s(moved) >= seconds * (1 - 1e-9):
            break
        best, seconds = moved, estimator.draft_s(moved)
    return best


def refine_shape(estimator: Estimator, shape: Shape, microbatches: int, after_s: After = nothing_after) -> Shape:
    """Moves single blocks between neighbouring stages while the pipeline's time and what follows it falls, and memory holds.

    The closed form ranks the moves, the simulation decides among the best few.
    """
    best, seconds = shape, estimator.pipeline_s(shape, microbatches) + after_s(shape)
    for _ in range(_ROUNDS):
        options = [s for s in _neighbours(best) if fits(estimator, s, microbatches)]
        fastest = fastest_of(estimator, options, microbatches, seconds, after_s)
        if fastest is None or fastest[0] >= seconds * (1 - 1e-6):
            return best
        seconds, best = fastest
    return best


def fastest_of(
    estimator: Estimator, shapes: Iterable[Shape], microbatches: int, below: float, after_s: After = nothing_after
) -> tuple[float, Shape] | None:
    """(seconds, shape) of the fastest by the simulation, among the best few by the closed form that may take less than `below`."""
    ranked = sorted(((estimator.quick_s(s, microbatches) + after_s(s), s) for s in shapes), key=_by_time)[:_SIMULATED]
    timed = [(estimator.pipeline_s(s, microbatches) + after_s(s), s) for quick, s in ranked if quick < below]
    return min(timed, key=_by_time, default=None)


def _by_time(entry: tuple[float, Shape]) -> tuple[float, tuple[int, ...]]:
    """Seconds, then cuts: equal times are broken alike in every process."""
    return entry[0], entry[1].ends


def _neighbours(shape: Shape) -> list[Shape]:
    out = []
    for i in range(len(shape.ends) - 1):
        for step in (-1, 1):
            ends = (*shape.ends[:i], shape.ends[i] + step, *shape.ends[i + 1 :])
            candidate = Shape(shape.rows, ends)
            if well_formed(candidate):
                out.append(candidate)
        if shape.rows[i] != shape.rows[i + 1]:
            out.append(_swapped(shape, i))
    return [candidate for candidate in out if well_formed(candidate)]


def _swapped(shape: Shape, i: int) -> Shape:
    """Stages i and i + 1 exchanged, each with its number of layers."""
    rows = (*shape.rows[:i], shape.rows[i + 1], shape.rows[i], *shape.rows[i + 2 :])
    middle = shape.starts[i] + shape.ends[i + 1] - shape.ends[i]
    return Shape(rows, (*shape.ends[:i], middle, *shape.ends[i + 1 :]))


def well_formed(shape: Shape) -> bool:
    """Whether every stage has at least one block: the embedding comes before the first, the head after the last."""
    layers = shape.ends[-1]
    bounds = [1, *shape.ends[:-1], layers - 1]
    return all(a < b for a, b in itertools.pairwise(bounds))


def fits(estimator: Estimator, shape: Shape, microbatches: int) -> bool:
    """Whether each stage's memory holds what 1F1B keeps in flight there."""
    tables, depth = estimator.tables, len(shape.rows)
    for stage, (row, start, end) in enumerate(zip(shape.rows, shape.starts, shape.ends)):
        if tables.memory_bytes(row, start, end, min(microbatches, depth - stage)) > tables.rows[row].limit_bytes:
            return False
    return True


def draft_fits(estimator: Estimator, draft: Draft) -> bool:
    """Whether each of its pipelines does."""
    return all(fits(estimator, shape, microbatches) for shape, microbatches in set(draft.pipelines))
