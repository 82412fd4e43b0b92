"""AdamW over flat masters and moments, in the order of the gradients' buffers: one fused call for
all whole parameters that decay, and one for those that do not.

The state that the rest of the program sees, local tensors by name, are views of the flat ones. A
parameter that other pipelines cut more finely lies in several buffers; its state stays in one
tensor of its own, as the model and the snapshots want it, and its pieces pass through memory of one
piece's size. Either way an element gets the same bits: see `ALIGNMENT`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autohet.runtime.layout import STATE_KINDS, state_name
from autohet.runtime.parallel.buckets import LocalBuffers, Piece, Run, runs_of
from autohet.runtime.state.optimizer import UpdateRule


@dataclass(frozen=True)
class _Stretch:
    """Whole parameters side by side, all of which decay or none:

    `tensors` (masters, first and second moments) belong to this part of the buffer of that index.
    """

    buffer: int
    start: int
    tensors: tuple[Tensor, ...]
    decays: bool

    def gradient(self, flats: Mapping[int, Tensor]) -> Tensor:
        return flats[self.buffer][self.start : self.start + self.tensors[0].numel()]


@dataclass(frozen=True)
class _Cut:
    """A part of a parameter; `runs` say where it lies in the tensors of the parameter's state."""

    buffer: int
    piece: Piece
    runs: tuple[Run, ...]

    def taken(self, state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """A copy of its masters and moments, flat."""
        tensors = []
        for kind in STATE_KINDS:
            held = state[state_name(kind, self.piece.parameter)]
            flat = held.new_zeros(self.piece.end - self.piece.offset)
            for run in self.runs:
                run.of_piece(self._shaped(flat)).copy_(run.of(held))
            tensors.append(flat)
        return tuple(tensors)

    def give_back(self, tensors: tuple[Tensor, ...], state: Mapping[str, Tensor]) -> None:
        for kind, flat in zip(STATE_KINDS, tensors, strict=True):
            for run in self.runs:
                run.of(state[state_name(kind, self.piece.parameter)]).copy_(
                    run.of_piece(self._shaped(flat))
                )

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat[: self.piece.num_elements].view(self.piece.shape)

    def gradient(self, flats: Mapping[int, Tensor]) -> Tensor:
        return flats[self.buffer][self.piece.offset : self.piece.end]


class FlatOptimizer:
    """Updates what this worker keeps the state of.

    state: local slices by state name; each tensor that can be becomes a view of a flat one. What it
    was before may be a view itself, of a flat one of an earlier generation, which is free only once
    no view of it is left. So masters go first, then first moments, then second ones: beside the
    state lies a third of it at most, which is what gradients take later.

    undecayed: names of parameters without weight decay.
    """

    def __init__(
        self,
        local: LocalBuffers,
        state: MutableMapping[str, Tensor],
        undecayed: Collection[str] = (),
    ) -> None:
        self._state, self._undecayed = state, frozenset(undecayed)
        self._cuts: list[_Cut] = []
        stretches: list[tuple[int, list[Piece]]] = []
        for index in local.kept:
            for whole, pieces in itertools.groupby(
                local.buffers[index].pieces,
                lambda piece: piece.units == local.owned[piece.parameter],
            ):
                if whole:
                    stretches.append((index, list(pieces)))
                else:
                    for piece in pieces:
                        runs = runs_of(
                            piece, local.specs[piece.parameter], local.owned[piece.parameter]
                        )
                        self._cuts.append(_Cut(index, piece, runs))
        by_kind = [self._laid_out(kind, stretches) for kind in STATE_KINDS]
        self._stretches = [
            part
            for (index, pieces), tensors in zip(stretches, zip(*by_kind, strict=True), strict=True)
            for part in self._by_decay(index, pieces, tensors)
        ]

    def _decays(self, piece: Piece) -> bool:
        return piece.parameter not in self._undecayed

    def _by_decay(
        self, buffer: int, pieces: Sequence[Piece], tensors: tuple[Tensor, ...]
    ) -> Iterator[_Stretch]:
        """Flat tensors of pieces side by side, cut where decay begins or ends."""
        begin = pieces[0].offset
        for decays, group in itertools.groupby(pieces, self._decays):
            alike = list(group)
            start, stop = alike[0].offset, alike[-1].end
            parts = tuple(tensor[start - begin : stop - begin] for tensor in tensors)
            yield _Stretch(buffer, start, parts, decays)

    @torch.no_grad()
    def _laid_out(self, kind: str, stretches: Sequence[tuple[int, list[Piece]]]) -> list[Tensor]:
        """All of one kind's flat tensors, one for each stretch; what is in none has memory of its
        own.
        """
        for name in {state_name(kind, cut.piece.parameter) for cut in self._cuts}:
            self._state[name] = _in_own_memory(self._state[name])
        return [self._flat(kind, pieces) for _, pieces in stretches]

    def _flat(self, kind: str, pieces: Sequence[Piece]) -> Tensor:
        start, stop = pieces[0].offset, pieces[-1].end
        flat = self._state[state_name(kind, pieces[0].parameter)].new_zeros(stop - start)
        for piece in pieces:
            name = state_name(kind, piece.parameter)
            view = flat[piece.offset - start :][: piece.num_elements].view(piece.shape)
            self._state[name] = view.copy_(self._state[name])
        return flat

    @torch.no_grad()
    def update(self, flats: Mapping[int, Tensor], rule: UpdateRule) -> None:
        """Apply a step's update in place. Talks to nobody; the host does not wait for the device.

        flats: summed fp32 gradients, by index of their buffer, which are scaled in place.
        """
        for decays in (True, False):
            alike = [each for each in self._stretches if each.decays == decays]
            if alike:
                fused_update(
                    [each.tensors for each in alike],
                    [each.gradient(flats) for each in alike],
                    replace(rule, decays=decays),
                )
        for cut in self._cuts:
            tensors = cut.taken(self._state)
            decays = self._decays(cut.piece)
            fused_update([tensors], [cut.gradient(flats)], replace(rule, decays=decays))
            cut.give_back(tensors, self._state)


def _in_own_memory(tensor: Tensor) -> Tensor:
    """A copy, where it is a part of a larger piece of memory."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def fused_update(
    tensors: Sequence[tuple[Tensor, ...]], gradients: Sequence[Tensor], rule: UpdateRule
) -> None:
    """AdamW of flat masters, each with its two moments, in place; all of a size that is a multiple
    of ALIGNMENT. Gradients are scaled in place.

    Elementwise, the same bits wherever an element lies.
    """
    rule.apply(list(zip(*tensors, strict=True)), gradients, fused=True)
