"""Model FLOPs utilisation and memory of each GPU type, beside what was predicted."""

from dataclasses import replace

import pytest

from autohet.control.ledger.run_summary import utilisation_by_gpu_type
from autohet.control.planning.proposals import PlanProposal
from autohet.driver.job.view import utilisation_lines
from planner.inputs.catalogue import find_gpu_type
from planner.plans.model_spec import ModelSpec
from planner.strategies import plan_with
from tests.planner.cases import fleet, model, request


def proposal(spec: ModelSpec | None = None) -> PlanProposal:
    asked = request(fleet(("A100", 2, 1), ("T4", 2, 1)), 16, spec)
    answer = plan_with("autohet", asked)
    return PlanProposal(answer.plan, answer.prediction, asked.cost)


@pytest.mark.parametrize("backward_share", [1.0, 0.5], ids=["all trained", "frozen in part"])
def test_the_parts_of_all_types_are_the_whole_models_flops(backward_share: float) -> None:
    """Wrong: three times the forward pass, whatever is trained."""
    whole = model()
    blocks = tuple(replace(block, backward_share=backward_share) for block in whole.blocks)
    made = proposal(replace(whole, blocks=blocks))
    found = utilisation_by_gpu_type(made, 2.0, {made.plan.workers[0]: 7})
    cost = made.cost
    total = 0.0
    for gpu_type, figures in found.items():
        known = find_gpu_type(gpu_type)
        assert known is not None
        total += figures["mfu"] * 2.0 * figures["gpus"] * known.peak_flops(cost.precision)
        ratio = figures["predicted_mfu"] / figures["mfu"]
        assert ratio == pytest.approx(2.0 / made.predicted_step_s, rel=0.05)
    batch = made.plan.global_batch_sequences
    spec, length = cost.spec, cost.sequence_length
    each = sum(
        (1.0 + 2.0 * layer.backward_share) * layer.forward_flops(length)
        for layer in (spec.embedding, *spec.blocks, spec.head)
    )
    assert each == spec.training_flops(length)
    assert total == pytest.approx(batch * each, rel=0.05)
    peaks = [figures["peak_memory_bytes"] for figures in found.values()]
    assert 7 in peaks


def test_nothing_measured_is_nothing_shown() -> None:
    found = utilisation_by_gpu_type(proposal(), None, {})
    assert utilisation_lines(found) == []
    assert all(figures["predicted_mfu"] is not None for figures in found.values())
