"""Weights that a stage computes with.

They are the masters themselves, copies of them in another dtype, or tensors that their owners send
before each step.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from autohet.runtime.facts.layout import state_name
from autohet.runtime.groups import GenerationGroups, Group
from autohet.runtime.models.parameter_spec import ParameterSpec, local_shape
from autohet.runtime.parallel.buckets import BUCKET_BYTES, LocalBuffers, ParameterPiece, runs_of
from autohet.runtime.parallel.host_staging import HostStaging
from autohet.runtime.parallel.stage_dtypes import StageDtypes

IN_FLIGHT = 3
"""Limit on broadcasts in flight; each has a buffer of BUCKET_BYTES, or of one larger unit."""


@dataclass(frozen=True)
class _Parcel:
    """Adjacent pieces of one buffer, sent over its group in one broadcast.

    The owner of whole matrices sends those that it does not compute with to `receiver`, a rank of
    its stage, over that `stage`'s group. None: this worker has no part in that. The receiver then
    sends them to the other holders in `group`; None: there are no others.
    """

    buffer: int
    owner: str
    receiver: str
    stage: Group | None
    group: Group | None
    pieces: tuple[ParameterPiece, ...]

    @property
    def num_elements(self) -> int:
        first = self.pieces[0]
        last = self.pieces[-1]
        return last.end - first.offset

    def views(self, flat: Tensor) -> Iterator[tuple[ParameterPiece, Tensor]]:
        """Yield each piece with its view in the parcel's flat tensor."""
        first = self.pieces[0].offset
        for piece in self.pieces:
            elements = flat[piece.offset - first : piece.stop - first]
            yield piece, elements.view(piece.shape)


class ComputeWeights:
    """Compute copies of this worker's parameters; the stage loads `tensors`.

    state: the masters. If this worker keeps the masters of all units of a parameter that it
    computes with, the tensor is that master, or a copy that `refresh` renews. Else `gather` fills
    the tensor, except for units that no other worker holds, which `refresh` fills. (In an uneven
    stage a rank may hold one head of a key projection alone, and share another.)
    staging: brings copies of masters in host memory to the device; None if masters lie on it.
    """

    def __init__(
        self,
        local: LocalBuffers,
        groups: GenerationGroups,
        state: Mapping[str, Tensor],
        dtypes: StageDtypes,
        device: torch.device,
        staging: HostStaging | None = None,
    ) -> None:
        self._staging = staging
        self._sent_dtype = dtypes.weights
        self._local = local
        self._state = state
        self._dtype = dtypes.compute
        self._device = device

        self.tensors: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._gathered: set[str] = set()
        for name, units in local.units.items():
            if local.owned.get(name) == units:
                self._place_own(name)
            else:
                self._gathered.add(name)
                spec = local.specs[name]
                self.tensors[name] = self._empty(spec, local_shape(spec, units))

        self._alone: list[ParameterPiece] = []
        for index in local.kept:
            if local.buffers[index].owner is None:
                pieces = local.buffers[index].pieces
                self._alone += [each for each in pieces if each.parameter in self._gathered]

        # All groups, in the order that all workers have.
        built = {members: groups.group(members) for members in local.groups}
        stage = local.stage_group(groups)
        self._parcels: list[_Parcel] = []
        for index, buffer in enumerate(local.buffers):
            members = local.group_of(index)
            # A buffer without an owner is not sent: each holder keeps its masters.
            if buffer.owner is None or buffer.receiver is None:
                continue
            group = None if members is None else built.get(members)
            moved_in = stage if index in local.moved else None
            if group is not None or moved_in is not None or local.me == buffer.owner:
                for pieces in _split(buffer.pieces, BUCKET_BYTES):
                    self._parcels.append(
                        _Parcel(index, buffer.owner, buffer.receiver, moved_in, group, pieces)
                    )
        self.refresh()

    def _place_own(self, name: str) -> None:
        """Let a parameter whose masters are all here be its master, or a copy of it."""
        master = self._state[state_name("param", name)]
        spec = self._local.specs[name]
        has_format = master.dtype == spec.compute_dtype(self._dtype)
        if has_format and self._staging is None:
            self.tensors[name] = master
            return
        copy = self._empty(spec, master.shape)
        self.tensors[name] = copy
        self._copies.append((copy, master))

    def _empty(self, spec: ParameterSpec, shape: Sequence[int]) -> Tensor:
        """Allocate a tensor to compute with."""
        dtype = spec.compute_dtype(self._dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    @property
    def are_gathered(self) -> bool:
        """True if some tensors come from other workers, or go to them."""
        return bool(self._parcels)

    @torch.no_grad()
    def refresh(self) -> None:
        """Renew the copies of masters that this worker keeps, after an update of the masters.

        Talks to nobody.
        """
        if self._staging is not None:
            for copy, master in self._copies:
                self._staging.up(master, copy)
        elif self._copies:
            copies = [copy for copy, _ in self._copies]
            masters = [master for _, master in self._copies]
            torch._foreach_copy_(copies, masters)
        for piece in self._alone:
            taken = torch.empty(piece.shape, dtype=self._dtype, device=self._device)
            self._take(piece, taken)
            self._put(piece, taken)

    @torch.no_grad()
    def gather(self) -> None:
        """Receive the tensors that others own, and send those that this worker owns.

        Every worker of the plan calls this, in the same state. Ended for the stream. It never
        writes to the masters, which a snapshot may be reading. Raises PeerLost, Interrupted.
        """
        me = self._local.me
        under_way: deque[tuple[_Parcel, Tensor, list[tuple[Group, Work | None]]]] = deque()
        for parcel in self._parcels:
            # Pieces of one buffer are all token counts or none is, so one dtype serves them.
            first = parcel.pieces[0].parameter
            dtype = self._local.specs[first].compute_dtype(self._sent_dtype)
            # Zeros, since the padding between pieces is sent too.
            flat = torch.zeros(parcel.num_elements, dtype=dtype, device=self._device)
            if parcel.owner == me:
                for piece, view in parcel.views(flat):
                    self._take(piece, view)
            under_way.append((parcel, flat, list(self._start(parcel, flat))))
            while len(under_way) > IN_FLIGHT:
                self._arrive(*under_way.popleft())
        while under_way:
            self._arrive(*under_way.popleft())

    def _take(self, piece: ParameterPiece, into: Tensor) -> None:
        """Copy a piece from the masters."""
        name = piece.parameter
        master = self._state[state_name("param", name)]
        spec = self._local.specs[name]
        owned = self._local.owned[name]
        for run in runs_of(piece, spec, owned):
            run.view_in_piece(into).copy_(run.view_in(master))

    def _put(self, piece: ParameterPiece, found: Tensor) -> None:
        """Copy a piece into the tensors that the stage computes with."""
        tensor = self.tensors[piece.parameter]
        for run in self._local.runs(piece):
            run.view_in(tensor).copy_(run.view_in_piece(found))

    def _start(self, parcel: _Parcel, flat: Tensor) -> Iterator[tuple[Group, Work | None]]:
        """Start to send a parcel on its way; yield what must end before it has arrived."""
        if parcel.stage is not None:
            if parcel.owner == self._local.me:
                work = parcel.stage.send(flat, parcel.receiver, parcel.buffer)
            else:
                work = parcel.stage.recv(flat, parcel.owner, parcel.buffer)
            if parcel.group is None:
                yield parcel.stage, work
            else:
                parcel.stage.wait_on_stream(work)
        if parcel.group is not None:
            yield parcel.group, parcel.group.start_broadcast(flat, parcel.receiver)

    def _arrive(
        self, parcel: _Parcel, flat: Tensor, works: Sequence[tuple[Group, Work | None]]
    ) -> None:
        for group, work in works:
            group.wait_on_stream(work)
        # A group may have members that do not hold the buffer: they send and receive along.
        buffer = self._local.buffers[parcel.buffer]
        if self._local.me in buffer.holders:
            for piece, view in parcel.views(flat):
                # Elsewhere the tensor is the master itself, which a snapshot may be reading.
                if piece.parameter in self._gathered:
                    self._put(piece, view)


def _split(
    pieces: tuple[ParameterPiece, ...], parcel_bytes: int
) -> Iterator[tuple[ParameterPiece, ...]]:
    """Group pieces into parcels of at most `parcel_bytes`, with at least one piece each."""
    together: list[ParameterPiece] = []
    for piece in pieces:
        # 4 bytes an element, as in fp32, whatever the dtype that is sent.
        if together:
            num_bytes = 4 * (piece.end - together[0].offset)
            if num_bytes > parcel_bytes:
                yield tuple(together)
                together = []
        together.append(piece)
    if together:
        yield tuple(together)
