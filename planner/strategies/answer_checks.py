"""Check of a strategy's answer against its request."""

from planner.errors import ConfigError
from planner.plans.plan import Plan
from planner.plans.plan_checks import check_plan
from planner.search.problem.request import Answer, Request


def check_answer(strategy: str, request: Request, answer: Answer) -> None:
    """Check that each plan of the answer does the work that was asked for, on the fleet's workers.

    A plan that leaves sequences out is costed as the faster one, so nothing else would show it.

    Raises:
        ConfigError: a plan is not whole, or is one of another request; names the strategy.
    """
    for each in (answer, *answer.front):
        try:
            _check_plan(request, each.plan)
        except ConfigError as error:
            raise ConfigError(
                f"strategy '{strategy}' answered with a wrong plan: {error}; correct the strategy,"
                " or choose another one"
            ) from error


def _check_plan(request: Request, plan: Plan) -> None:
    check_plan(plan, request.spec.num_layers)
    if plan.global_batch_sequences != request.global_batch_sequences:
        raise ConfigError(
            f"its global_batch_sequences is {plan.global_batch_sequences}, but the request's is"
            f" {request.global_batch_sequences}"
        )

    asked = request.microbatch_sequences
    sizes = plan.microbatch_sizes
    if asked is not None and sizes != [asked]:
        raise ConfigError(
            f"its microbatches have {sizes} sequences, but the request's have {asked}"
        )

    strangers = sorted(set(plan.workers).difference(request.fleet.workers))
    if strangers:
        raise ConfigError(f"worker '{strangers[0]}' is not in the fleet")
