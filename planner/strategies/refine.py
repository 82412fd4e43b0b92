"""Local search on a draft under the 1F1B simulation: one block or one stage to its neighbour's place, one microbatch
to another pipeline.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

from planner.search.draft import Draft, Estimator, Shape, assign_microbatches

_ROUNDS = 12
_SIMULATED = 3
FAR_BEHIND = 1.15  # what is slower than the best by more is not made better by single moves

After = Callable[[Shape], float]  # seconds from a pipeline's end to that of its gradients' sums


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


def refine_shape(estimator: Estimator, shape: Shape, microbatches: int, after_s: After | None = None) -> Shape:
    """Moves single blocks between stages while the pipeline's time and what follows it falls, and memory holds.

    The closed form ranks the moves, the simulation decides among the best few.
    """
    best, seconds = shape, estimator.pipeline_s(shape, microbatches) + (after_s(shape) if after_s else 0.0)
    for _ in range(_ROUNDS):
        fastest = fastest_of(estimator, _moves(estimator, best, microbatches, after_s), microbatches, seconds, after_s)
        if fastest is None or fastest[0] >= seconds * (1 - 1e-6):
            return best
        seconds, best = fastest
    return best


def fastest_of(
    estimator: Estimator,
    quick: Iterable[tuple[float, Shape]],
    microbatches: int,
    below: float,
    after_s: After | None = None,
) -> tuple[float, Shape] | None:
    """(seconds, shape) of the fastest by the simulation, among the best few that fit by the closed form given with each and that may
    take less than `below`."""
    known = ((s + (after_s(shape) if after_s else 0.0), shape) for s, shape in quick if s < below)
    ranked = sorted((entry for entry in known if entry[0] < below), key=by_time)
    near = itertools.islice((shape for _, shape in ranked if fits(estimator, shape, microbatches)), _SIMULATED)
    timed = [(estimator.pipeline_s(s, microbatches) + (after_s(s) if after_s else 0.0), s) for s in near]
    return min(timed, key=by_time, default=None)


def by_time(entry: tuple[float, Shape]) -> tuple[float, tuple[int, ...]]:
    """Seconds, then cuts: equal times are broken alike in every process."""
    return entry[0], entry[1].ends


def _moves(
    estimator: Estimator, shape: Shape, microbatches: int, after_s: After | None
) -> Iterator[tuple[float, Shape]]:
    """With its closed form: each cut one block on, unequal neighbours exchanged, and where sync counts, which is that of
    early stages, a block of the first stage given to any other."""
    shifted_s, bounds = estimator.shifted_s(shape, microbatches), (1, *shape.ends[:-1], shape.ends[-1] - 1)
    others = []
    for i in range(len(shape.ends) - 1):
        for step in (-1, 1):
            if bounds[i] < shape.ends[i] + step < bounds[i + 2]:
                yield (
                    shifted_s(i, step),
                    Shape(shape.rows, (*shape.ends[:i], shape.ends[i] + step, *shape.ends[i + 1 :])),
                )
        if shape.rows[i] != shape.rows[i + 1]:
            others.append(_swapped(shape, i))
        if after_s is not None and i > 0:
            others.append(Shape(shape.rows, (*(end - 1 for end in shape.ends[: i + 1]), *shape.ends[i + 1 :])))
    yield from ((estimator.quick_s(other, microbatches), other) for other in others if well_formed(other))


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
