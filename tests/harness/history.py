"""By which generations a state was made: two steps of one number are bit-equal in the exact model
whatever generation ran them, so that a restore that mixes histories, or takes an abandoned one,
would go unseen without this.

Each layer of the exact model has a `history`. Where `keep_history` was called, every update of a
worker replaces it by `next_history(itself, generation)`: layers that went the same way are alike,
and the way can be told from a run's events.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

MARK = ".history."
_MODULUS = 65_521
_FACTOR = 31  # 31 x 65,521 and a generation are below 2^24: exact in fp32


def next_history(before: int, generation: int) -> int:
    return (before * _FACTOR + generation) % _MODULUS


def keep_history() -> None:
    """From now on this process's workers write down the generation of each update, as a part of
    it.
    """
    from autohet.runtime.groups import GenerationGroups
    from autohet.runtime.step.trainer import StageTrainer

    begin = GenerationGroups.__init__
    update = StageTrainer.apply_update

    def numbered(self: Any, store: Any, generation: int, *arguments: Any, **named: Any) -> None:
        self.generation = generation
        begin(self, store, generation, *arguments, **named)

    def written_down(self: Any, vote: Any) -> None:
        held = [
            tensor
            for name, tensor in self.state.items()
            if name.startswith("param/") and MARK in name
        ]
        before = [int(tensor[0]) for tensor in held]  # weight decay changes them
        update(self, vote)
        for tensor, history in zip(held, before, strict=True):
            tensor.fill_(next_history(history, self.groups.generation))

    GenerationGroups.__init__ = numbered  # type: ignore[method-assign]
    StageTrainer.apply_update = written_down  # type: ignore[method-assign]


def history_of(steps: Iterable[Mapping[str, Any]]) -> int:
    """What every layer has to hold after the steps that these events tell of; a step that was run
    again counts as it was run last, and a skipped one updates nothing.
    """
    steps = list(steps)
    skipped = {event["step"] for event in steps if event["kind"] == "skipped"}
    generation_by_step = {
        event["step"]: event["generation"] for event in steps if event["kind"] == "step"
    }
    history = 0
    for step in sorted(generation_by_step.keys() - skipped):
        history = next_history(history, generation_by_step[step])
    return history


def unlike_histories(values: Mapping[str, Tensor], wanted: int | None = None) -> list[str]:
    """Layers (by the name of their shard) whose history is not the `wanted` one, or not that of the
    first where none is.
    """
    found = {
        name: sorted({int(value) for value in tensor.unique()}) for name, tensor in values.items()
    }
    wanted = next(iter(found.values()))[0] if wanted is None else wanted
    return [
        f"{name} has history {held}, not {wanted}"
        for name, held in sorted(found.items())
        if held != [wanted]
    ]
