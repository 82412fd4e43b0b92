"""The strategy `hap`: plans of one program, whole and within memory, their document, and what is
said where there is none.
"""

import functools
import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from autohet.bench.planner.synthetic import llama_decoder
from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.errors import ConfigError, InfeasibleError
from planner.plans.model_spec import LayerSpec, ModelSpec
from planner.plans.plan import Plan
from planner.plans.plan_checks import check_plan
from planner.strategies import Request, plan_with
from tests.planner.cases import fleet, profile, with_nics

FAST_NICS = {"A100": 4e10, "A10G": 4e10, "T4": 4e10}


def llama(
    layers: int = 2, width: int = 64, inner: int = 128, vocabulary: int = 512, heads: int = 8
) -> ModelSpec:
    products = 4 * width * width + 3 * width * inner
    block = LayerSpec(
        products + 2 * width, 2 * width, products, width, 8 * width + 4 * inner, 4 * width
    )
    head = LayerSpec(vocabulary * width + width, width, vocabulary * width, 0, 0, 2 * width)
    embedding = LayerSpec(vocabulary * width, 0, 0, 0, 0, width)
    return ModelSpec(
        "tiny",
        "llama",
        width,
        vocabulary,
        heads,
        heads,
        inner,
        False,
        8,
        embedding,
        (block,) * layers,
        head,
    )


def asked(
    types: tuple[tuple[str, int, int], ...],
    batch: int,
    spec: ModelSpec | None = None,
    **wishes: Any,
) -> Request:
    spec, of = spec or llama(), with_nics(fleet(*types), FAST_NICS)
    workload = Workload(spec, 128, "fp32")
    if spec.model_type == "llama":
        workload = replace(workload, decoder=partial(llama_decoder, spec, 128, "fp32"))
    cost = CostModel(of, workload, Measurements(profile()))
    return Request(of, spec, cost, batch, 128, **wishes)


def test_a_plan_is_one_program_that_fits_and_survives_its_document() -> None:
    request = asked((("A100", 1, 1), ("A10G", 1, 2)), 16)
    answer = plan_with("hap", request)
    check_plan(answer.plan, 2)
    assert answer.prediction.fits
    assert sum(answer.prediction.breakdown_s.values()) == pytest.approx(
        answer.prediction.step_time_s
    )
    assert answer.plan.spmd is not None
    read = Plan.from_json(answer.plan.to_json())
    assert read == answer.plan
    assert request.cost.predict(read).step_time_s == answer.prediction.step_time_s
    idle = [worker for item in answer.idle for worker in item.workers]
    assert sorted([*answer.plan.workers, *idle]) == sorted(request.fleet.workers)


def test_a_gpu_of_twice_the_speed_gets_twice_the_samples() -> None:
    plan = plan_with("hap", asked((("A100", 1, 1), ("A10G", 1, 2)), 16, llama(4))).plan
    assert plan.spmd is not None
    assert max(dict(plan.spmd.units).values(), key=sum) == (8, 4, 4)


def test_layers_wanted_on_two_nodes_lie_whole_on_each() -> None:
    request = asked((("A100", 1, 1), ("A10G", 2, 1)), 16, min_node_disjoint_holders=2)
    plan = plan_with("hap", request).plan
    assert plan.spmd is not None
    assert plan.spmd.is_whole
    assert len(plan.workers) > 1


def test_after_its_time_it_answers_with_the_best_found_and_says_so() -> None:
    ticks = itertools.count()
    answer = plan_with(
        "hap",
        asked(
            (("A100", 1, 1), ("A10G", 1, 2)), 16, time_limit_s=0.5, clock=lambda: float(next(ticks))
        ),
    )
    assert answer.prediction.fits
    assert [item.why for item in answer.rejected if "not looked at" in item.why] == [
        "not looked at: 0.5 s were over"
    ]


def test_autohet_takes_a_program_where_it_is_allowed_and_faster_and_says_so_of_the_other() -> None:
    """One fast GPU beside two slow ones, and 15 samples: no pipelines divide them as well."""
    types = (("A100", 1, 1), ("A10G", 1, 2))
    pipelines = plan_with("autohet", asked(types, 16, llama(3)))
    either = plan_with("autohet", asked(types, 16, llama(3), spmd=True))
    program = plan_with("hap", asked(types, 16, llama(3)))
    assert pipelines.plan.spmd is None
    faster = program.prediction.step_time_s * 1.02 <= pipelines.prediction.step_time_s
    assert (either.plan.spmd is not None) == faster
    assert either.strategy == "autohet"
    assert any(("pipelines" if faster else "SPMD") in item.what for item in either.rejected)


def test_a_model_larger_than_every_mix_and_a_model_without_a_graph_are_one_message_each() -> None:
    with pytest.raises(
        InfeasibleError, match=r"fits no mix of these 3 devices.*needs .* GiB.*add devices"
    ):
        plan_with("hap", asked((("A100", 1, 1), ("A10G", 1, 2)), 4, llama(12, 8192, 65536)))
    spec = llama()
    unknown = ModelSpec("odd", "opt", *(getattr(spec, name) for name in ModelSpec.__slots__[2:]))  # type: ignore[attr-defined]
    with pytest.raises(
        InfeasibleError, match=r"no graph is known of model 'odd' \(type opt\).*with pipelines"
    ):
        plan_with("hap", asked((("A100", 1, 1),), 4, unknown))


@functools.cache
def planned() -> tuple[Request, str]:
    """Return a request and the document of its program."""
    request = asked((("A100", 1, 1), ("A10G", 1, 2)), 16)
    return request, plan_with("hap", request).plan.to_json()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ratios": [[0.5, 0.5]]}, "one or two rows of 3 shares"),
        ({"ratios": [[0.9, 0.3, -0.2]]}, "none below 0"),
        ({"program": ["conjure x:replicated"]}, "unknown instruction 'conjure'"),
        ({"program": ["load x"]}, "must be a tensor and its layout"),
        ({"program": ["load ids:replicated"]}, "none of this model"),
        ({"units": {"ids.0": [16, 0, 0]}}, "not what its ratios round to"),
        ({"colour": 1}, "unknown key 'colour'"),
    ],
)
def test_a_document_that_is_no_program_is_refused(change: dict[str, Any], named: str) -> None:
    request, plan = planned()
    document = json.loads(plan)
    document["pipelines"][0]["stages"][0]["spmd"] |= change
    with pytest.raises(ConfigError, match=named):
        request.cost.predict(Plan.from_document(document))
