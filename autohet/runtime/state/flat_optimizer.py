"""Optimizer over masters and moments that lie flat, in the order of the gradients' buffers.

AdamW's do; those of matrices that Muon updates have tensors of their own.

One fused call updates all whole parameters that decay, and one those that do not.

The rest of the program sees the state as local tensors by name, which are views of the flat
tensors. A parameter that other pipelines cut more finely lies in several buffers. Its state stays
in one tensor of its own, as the model and the snapshots need it, and its pieces pass through memory
of one piece's size. An element gets the same bits in both cases: see `ALIGNMENT`.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autohet.runtime.facts.layout import MUON_KINDS, STATE_KINDS, state_name
from autohet.runtime.parallel.buckets import LocalBuffers, ParameterPiece, Run, runs_of
from autohet.runtime.parallel.host_staging import HostStaging
from autohet.runtime.state.optimizer import UpdateRule


@dataclass(frozen=True)
class _FlatRange:
    """Adjacent whole parameters of a buffer, either all with weight decay or all without.

    `tensors` (masters, first and second moments) belong to this range of the buffer with that
    index.
    """

    buffer: int
    start: int
    tensors: tuple[Tensor, ...]
    decays: bool

    def gradient(self, flats: Mapping[int, Tensor]) -> Tensor:
        end = self.start + self.tensors[0].numel()
        return flats[self.buffer][self.start : end]


@dataclass(frozen=True)
class _Cut:
    """Part of a parameter; `runs` map it to the tensors of the parameter's state."""

    buffer: int
    piece: ParameterPiece
    runs: tuple[Run, ...]

    def take(self, state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return a flat copy of the part's masters and moments."""
        tensors = []
        for kind in STATE_KINDS:
            held = state[state_name(kind, self.piece.parameter)]
            flat = held.new_zeros(self.piece.end - self.piece.offset)
            for run in self.runs:
                run.view_in_piece(self._reshape(flat)).copy_(run.view_in(held))
            tensors.append(flat)
        return tuple(tensors)

    def give_back(self, tensors: tuple[Tensor, ...], state: Mapping[str, Tensor]) -> None:
        for kind, flat in zip(STATE_KINDS, tensors, strict=True):
            held = state[state_name(kind, self.piece.parameter)]
            shaped = self._reshape(flat)
            for run in self.runs:
                run.view_in(held).copy_(run.view_in_piece(shaped))

    def copy_gradient(self, flats: Mapping[int, Tensor], into: Tensor) -> None:
        """Copy the part's gradient to its place in that of the parameter."""
        own = self.piece.view_in(flats[self.buffer])
        for run in self.runs:
            run.view_in(into).copy_(run.view_in_piece(own))

    def _reshape(self, flat: Tensor) -> Tensor:
        return flat[: self.piece.num_elements].view(self.piece.shape)

    def gradient(self, flats: Mapping[int, Tensor]) -> Tensor:
        return flats[self.buffer][self.piece.offset : self.piece.end]


@dataclass(frozen=True)
class _Matrices:
    """Muon's matrices of one parameter: itself, or of a stack the experts that are owned here.

    parts: all of the gradient.
    """

    parameter: str
    parts: Sequence[_Cut]
    decays: bool

    def update(
        self, state: Mapping[str, Tensor], flats: Mapping[int, Tensor], rule: UpdateRule
    ) -> None:
        """Update masters and momenta in place; a gradient in one piece is scaled there."""
        master, momentum = (state[state_name(kind, self.parameter)] for kind in MUON_KINDS)
        first = self.parts[0]
        if first.piece.shape == master.shape:
            gradient = first.piece.view_in(flats[first.buffer])
        else:
            gradient = torch.empty_like(master)
            for part in self.parts:
                part.copy_gradient(flats, gradient)
        gradient.mul_(rule.factor)
        own_rule = replace(rule, decays=self.decays)
        own_rule.orthogonalize(*map(_matrices_of, (master, gradient, momentum)))


def _matrices_of(tensor: Tensor) -> list[Tensor]:
    """Return views of a matrix, or of each one of a stack."""
    return list(tensor.view(-1, *tensor.shape[-2:]))


class FlatOptimizer:
    """Optimizer of the state that this worker keeps.

    state: local slices by state name. Each tensor becomes a view of a flat one if possible. A
    tensor may already be a view of a flat tensor of an earlier generation, which is freed only
    after its last view. Masters are therefore moved first, then first moments, then second moments.
    The extra memory is at most a third of the state, and gradients use it later.

    undecayed: names of parameters without weight decay. staging: brings gradients to a state in
    host memory; None if the state is on the device.
    """

    def __init__(
        self,
        local: LocalBuffers,
        state: MutableMapping[str, Tensor],
        undecayed: Collection[str] = (),
        staging: HostStaging | None = None,
    ) -> None:
        self._state = state
        self._undecayed = frozenset(undecayed)
        self._staging = staging

        self._cuts: list[_Cut] = []
        parts: dict[str, list[_Cut]] = defaultdict(list)
        ranges: list[tuple[int, list[ParameterPiece]]] = []
        for index in local.kept:
            for whole, pieces in _by_wholeness(local, index):
                if whole:
                    ranges.append((index, pieces))
                    continue
                for piece in pieces:
                    name = piece.parameter
                    runs = runs_of(piece, local.specs[name], local.owned[name])
                    own = parts[name] if local.specs[name].uses_muon else self._cuts
                    own.append(_Cut(index, piece, runs))

        assert staging is None or not parts, "Muon has no update in host memory"
        for kind, name in itertools.product(MUON_KINDS, parts):
            held = state_name(kind, name)
            self._state[held] = self._in_own_memory(self._state[held])
        self._matrices = [
            _Matrices(name, each, name not in self._undecayed) for name, each in parts.items()
        ]

        # Kind by kind, not range by range: an old flat tensor is freed with its last view.
        by_kind = [self._lay_out(kind, ranges) for kind in STATE_KINDS]
        self._ranges: list[_FlatRange] = []
        self._counted: list[tuple[int, ParameterPiece]] = []
        for (index, adjacent), tensors in zip(ranges, zip(*by_kind, strict=True), strict=True):
            if local.buffers[index].is_token_count:
                self._counted += [(index, piece) for piece in adjacent]
            else:
                self._ranges += self._by_decay(index, adjacent, tensors)

    def _decays(self, piece: ParameterPiece) -> bool:
        return piece.parameter not in self._undecayed

    def _by_decay(
        self, buffer: int, pieces: Sequence[ParameterPiece], tensors: tuple[Tensor, ...]
    ) -> Iterator[_FlatRange]:
        """Yield the flat tensors of adjacent pieces, split where weight decay begins or ends."""
        begin = pieces[0].offset
        for decays, group in itertools.groupby(pieces, self._decays):
            alike = list(group)
            start = alike[0].offset
            span = slice(start - begin, alike[-1].end - begin)
            parts = tuple(tensor[span] for tensor in tensors)
            yield _FlatRange(buffer, start, parts, decays)

    @torch.no_grad()
    def _lay_out(
        self, kind: str, ranges: Sequence[tuple[int, list[ParameterPiece]]]
    ) -> list[Tensor]:
        """Build all flat tensors of one kind, one for each range.

        State that is in no range gets memory of its own.
        """
        for name in {state_name(kind, cut.piece.parameter) for cut in self._cuts}:
            self._state[name] = self._in_own_memory(self._state[name])
        return [self._flat(kind, pieces) for _, pieces in ranges]

    def _flat(self, kind: str, pieces: Sequence[ParameterPiece]) -> Tensor:
        start = pieces[0].offset
        num_elements = pieces[-1].end - start
        if self._staging is None:
            first = self._state[state_name(kind, pieces[0].parameter)]
            flat = first.new_zeros(num_elements)
        else:
            flat = self._staging.zeros(num_elements)

        for piece in pieces:
            name = state_name(kind, piece.parameter)
            offset = piece.offset - start
            view = flat[offset : offset + piece.num_elements].view(piece.shape)
            self._state[name] = view.copy_(self._state[name])
        return flat

    def _in_own_memory(self, tensor: Tensor) -> Tensor:
        """Clone the tensor if it is a view into larger storage, or copy it to host memory."""
        if self._staging is not None:
            return self._staging.zeros(*tensor.shape).copy_(tensor)
        is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
        if is_view:
            return tensor.clone()
        return tensor

    @torch.no_grad()
    def update(self, flats: Mapping[int, Tensor], rule: UpdateRule) -> None:
        """Apply a step's update in place, without communication.

        The host does not wait for the device, unless the state is offloaded: the update has then
        ended.

        flats: summed fp32 gradients by the index of their buffer; they are scaled in place.
        """
        for decays in (True, False):
            alike = [each for each in self._ranges if each.decays == decays]
            if alike:
                tensors = [each.tensors for each in alike]
                gradients = [each.gradient(flats) for each in alike]
                self._apply(tensors, gradients, replace(rule, decays=decays))

        for matrices in self._matrices:
            matrices.update(self._state, flats, rule)

        for cut in self._cuts:
            taken = cut.take(self._state)
            own_rule = replace(rule, decays=self._decays(cut.piece))
            self._apply([taken], [cut.gradient(flats)], own_rule)
            cut.give_back(taken, self._state)

        for index, piece in self._counted:
            bias = self._state[state_name("param", piece.parameter)]
            counts = self._state[state_name("exp_avg", piece.parameter)]
            rule.balance(bias, counts, piece.view_in(flats[index]))

    def _apply(
        self, tensors: Sequence[tuple[Tensor, ...]], gradients: Sequence[Tensor], rule: UpdateRule
    ) -> None:
        """Update flat masters and their moments in place."""
        if self._staging is None:
            fused_update(tensors, gradients, rule)
            return
        for held, gradient in zip(tensors, gradients, strict=True):
            for start, part in self._staging.down(gradient):
                end = start + part.numel()
                parts = tuple(tensor[start:end] for tensor in held)
                fused_update([parts], [part], rule)


def fused_update(
    tensors: Sequence[tuple[Tensor, ...]], gradients: Sequence[Tensor], rule: UpdateRule
) -> None:
    """Apply AdamW in place to flat masters with their two moments.

    Sizes are multiples of ALIGNMENT. Gradients are scaled in place. The update is elementwise, with
    the same bits wherever an element lies.
    """
    rule.apply(list(zip(*tensors, strict=True)), gradients, fused=True)


def _by_wholeness(local: LocalBuffers, index: int) -> Iterator[tuple[bool, list[ParameterPiece]]]:
    """Yield adjacent pieces of a buffer; True: AdamW updates each, and it is all that is held here
    of its parameter.
    """

    def is_whole(piece: ParameterPiece) -> bool:
        name = piece.parameter
        return piece.units == local.owned[name] and not local.specs[name].uses_muon

    for whole, pieces in itertools.groupby(local.buffers[index].pieces, is_whole):
        yield whole, list(pieces)
