"""EMULATED speed of each worker's forward and backward pass.

The seconds are those of the GPU type that the worker's node poses as, from the planner's own
profile.
"""

from collections.abc import Mapping

from autohet.control.planning.proposals import PlanProposal
from autohet.runtime.step.pacing import Pace


def paces_of(proposal: PlanProposal) -> Mapping[str, Pace]:
    """Return the seconds of one microbatch's forward and backward pass by worker of the plan."""
    plan = proposal.plan
    paces: dict[str, Pace] = {}
    if plan.spmd is not None:
        for worker, seconds in proposal.cost.programs.work_by_worker(plan).items():
            paces[worker] = Pace(*seconds)
        return paces

    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            seconds = proposal.cost.stages.seconds(pipeline, index, rated=True)
            for worker in stage.workers:
                paces[worker] = Pace(*seconds)
    return paces
