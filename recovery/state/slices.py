"""A worker's local tensors seen as units: views of each."""

from collections.abc import Mapping, Sequence

import torch

from recovery.state.layout import ITEM_BYTES_BY_DTYPE, ShardId, TensorSpec, units_by_tensor

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEM_BYTES_BY_DTYPE
}


def unit_views(
    spec: TensorSpec, units: Sequence[int], local: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Return views of `local`, one for each of the ascending `units` that it concatenates.

    Raises:
        ValueError: the tensor's shape or dtype is not what the units make.
    """
    check_local(spec, units, local)
    if spec.split_dim is None:
        return {unit: local.view_as(local) for unit in units}
    views = {}
    position = 0
    for unit in units:
        size = spec.unit_extent(unit)
        views[unit] = local.narrow(spec.split_dim, position, size)
        position += size
    return views


def check_local(spec: TensorSpec, units: Sequence[int], local: torch.Tensor) -> None:
    """Raise ValueError unless `local` has the shape and dtype of the concatenated `units`."""
    if list(units) != sorted(set(units)):
        raise ValueError(f"{spec.name}: units {tuple(units)} must ascend without repetition")

    expected = spec.local_shape(units)
    if tuple(local.shape) != expected or local.dtype != TORCH_DTYPES[spec.dtype]:
        found_dtype = str(local.dtype).removeprefix("torch.")
        raise ValueError(
            f"{spec.name}: units {tuple(units)} make a {spec.dtype} tensor of shape {expected}, "
            f"not {found_dtype} of shape {tuple(local.shape)}"
        )


def empty_local(
    spec: TensorSpec, units: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return an uninitialised contiguous local tensor for `units`."""
    shape = spec.local_shape(units)
    return torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype], device=device)


def shard_views(
    tensors: Mapping[str, TensorSpec],
    shards: Sequence[ShardId] | frozenset[ShardId],
    state: Mapping[str, torch.Tensor],
) -> dict[ShardId, torch.Tensor]:
    """Return views of a worker's whole local state, one per shard, sorted by shard.

    Raises:
        ValueError: a local tensor is missing or is not the concatenation of the worker's units of
        it.
    """
    views: dict[ShardId, torch.Tensor] = {}
    for name, units in units_by_tensor(shards).items():
        if name not in state:
            raise ValueError(f"the worker holds shards of {name}, but its state has no such tensor")
        for unit, view in unit_views(tensors[name], units, state[name]).items():
            views[ShardId(name, unit)] = view
    return views


def names_by_memory(state: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Group tensor names by the memory that the tensors share.

    Such memory is free only once none of its tensors is left.
    """
    found: dict[int, set[str]] = {}
    for name, tensor in state.items():
        address = tensor.untyped_storage().data_ptr()
        found.setdefault(address, set()).add(name)
    return list(found.values())
