"""The benchmark's mixtures of experts have the sizes that their names say."""

import pytest

from autohet.bench.planner.synthetic import gshard_spec, profile_of

BILLIONS = {
    (768, 8, 8): 0.38,
    (768, 8, 16): 0.69,
    (768, 16, 16): 1.3,
    (1024, 16, 16): 2.4,
    (1536, 16, 32): 10,
    (2048, 16, 48): 27,
    (2048, 32, 64): 70,
    (2048, 32, 128): 140,
}
"""Parameters by width, layers and experts: moe_specs in alpa-projects/alpa,
benchmark/alpa/suite_manual_moe.py, whose names are rounded.
"""


@pytest.mark.parametrize("sizes", BILLIONS)
def test_it_has_as_many_parameters_as_its_name_says(sizes):
    width, layers, experts = sizes
    spec = gshard_spec("m", layers, width, experts)
    assert spec.parameters / 1e9 == pytest.approx(BILLIONS[sizes], rel=0.04)


def test_each_kind_of_block_has_times_of_its_own():
    spec = gshard_spec("m", 4, 64, 8)
    profile = profile_of(spec, 32, ("T4",))
    assert {row.layer for row in profile.measurements} == {
        "embedding",
        "head",
        "block:0",
        "block:1",
    }
    seconds = {row.layer: row.forward_s for row in profile.measurements if row.tp_degree == 1}
    assert seconds["block:0"] > seconds["block:1"], "two experts take longer than one inner product"
