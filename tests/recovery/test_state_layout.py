"""Specs, units and layouts: against slicing the whole tensor with torch."""

import pickle

import msgspec
import pytest
import torch

from recovery.state.layout import Layout, ShardId, TensorSpec, units_by_tensor
from recovery.state.slices import shard_views, unit_views
from tests.harness.state_cases import placed, state_of, tensors_of, unit, whole

ROWS = TensorSpec("param/a.0.w", (8, 3), "float32", 0, (0, 2, 5, 8))
COLUMNS = TensorSpec("param/a.0.v", (2, 3, 10), "bfloat16", 2, (0, 1, 4, 10))
UNCUT = TensorSpec("param/a.0.norm", (7,), "float32")
SCALAR = TensorSpec("param/a.0.scale", (), "float32")


@pytest.mark.parametrize("spec", [ROWS, COLUMNS, UNCUT, SCALAR])
def test_units_tile_the_tensor(spec: TensorSpec) -> None:
    full = torch.arange(1, 1 + max(1, full_size(spec)), dtype=torch.float32).view(spec.shape)
    seen = torch.zeros(spec.shape)
    for shard in spec.shards:
        piece = full[spec.unit_slices(shard.unit)]
        assert piece.shape == spec.unit_shape(shard.unit)
        assert spec.unit_bytes(shard.unit) == piece.numel() * spec.item_bytes
        seen[spec.unit_slices(shard.unit)] += 1
    assert torch.equal(seen, torch.ones(spec.shape))
    assert sum(spec.unit_bytes(shard.unit) for shard in spec.shards) == spec.num_bytes


def full_size(spec: TensorSpec) -> int:
    return spec.num_bytes // spec.item_bytes


@pytest.mark.parametrize("units", [(0,), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("spec", [ROWS, COLUMNS])
def test_a_local_tensor_is_the_concatenation_of_its_units(
    spec: TensorSpec, units: tuple[int, ...]
) -> None:
    full = whole(spec, 0)
    pieces = {number: full[spec.unit_slices(number)] for number in units}
    assert spec.split_dim is not None
    local = torch.cat([pieces[number] for number in units], spec.split_dim)
    for number, view in unit_views(spec, units, local).items():
        assert torch.equal(view, pieces[number])
        view.zero_()
    assert not local.any(), "views share the local tensor's memory"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cuts": (0, 3, 3, 8)}, "must ascend"),
        ({"cuts": (1, 8)}, "must ascend from 0"),
        ({"cuts": (0, 7)}, "to 8"),
        ({"split_dim": 2, "cuts": (0, 8)}, "not a dimension"),
        ({"split_dim": None, "cuts": (0, 1, 2)}, "one unit"),
        ({"dtype": "float31"}, "float31"),
    ],
)
def test_impossible_specs_are_refused(change: dict[str, object], message: str) -> None:
    document = msgspec.to_builtins(ROWS) | change
    with pytest.raises(ValueError, match=message):
        msgspec.convert(document, TensorSpec)


def test_layout_answers_who_holds_what() -> None:
    case = placed(tensors_of(2), 2, [[(1, ["a/0", "a/1"]), (1, ["b/0"])], [(2, ["c/0"])]])
    rows, norm = ShardId("param/layers.0.rows", 3), ShardId("param/layers.0.norm", 0)
    assert case.layout.holders(rows) == ("a/1", "c/0")
    assert case.layout.holders(norm) == ("a/0", "a/1", "c/0")
    assert case.layout.holders(ShardId("param/layers.0.rows", 9)) == ()
    assert case.layout.bytes_of("c/0") == case.layout.num_bytes
    assert case.layout.units_of("a/1")["param/layers.0.rows"] == (2, 3)
    assert units_by_tensor([ShardId("b", 2), ShardId("a", 0), ShardId("b", 0)]) == {
        "a": (0,),
        "b": (0, 2),
    }


def test_layout_refuses_a_shard_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"w is to hold param/a\.0\.w\[3\]"):
        Layout({ROWS.name: ROWS}, {"w": frozenset({ShardId(ROWS.name, 3)})})


def test_shard_views_check_the_state() -> None:
    case = placed(tensors_of(1), 1, [[(1, ["a/0", "a/1"])]])
    state = state_of(case.layout, "a/1", 3)
    shards = case.layout.shards_by_worker["a/1"]
    views = shard_views(case.layout.tensors, shards, state)
    assert set(views) == shards
    for shard, view in views.items():
        assert torch.equal(view, unit(case.layout.tensors[shard.tensor], shard, 3))
    with pytest.raises(ValueError, match="rows"):
        shard_views(
            case.layout.tensors, shards, {**state, "param/layers.0.rows": torch.zeros(8, 3)}
        )
    del state["param/layers.0.norm"]
    with pytest.raises(ValueError, match=r"layers\.0\.norm"):
        shard_views(case.layout.tensors, shards, state)


def test_a_pickled_layout_is_equal_and_takes_no_derived_values_along() -> None:
    """Wrong: orders to a thousand workers carry what the driver has derived from the layout."""
    specs = {spec.name: spec for spec in (SCALAR, UNCUT, COLUMNS, ROWS)}
    everything = frozenset(shard for spec in specs.values() for shard in spec.shards)
    some = frozenset({ShardId(ROWS.name, 2), ShardId(SCALAR.name, 0)})
    workers = {f"n{number}/0": everything for number in range(50)}
    layout = Layout(specs, {**workers, "some/0": some, "none/0": frozenset()})
    packed = pickle.dumps(layout)
    for shard in layout.shards:
        assert layout.holders(shard)
        layout.shard_bytes(shard)
    assert layout.units_of("some/0") == {SCALAR.name: (0,), ROWS.name: (2,)}
    assert pickle.dumps(layout) == packed
    found = pickle.loads(packed)
    assert found == layout
    assert list(found.tensors) == list(layout.tensors)
    assert found.shards_by_worker["n1/0"] is found.shards_by_worker["n49/0"]
    assert len(packed) < 1000
