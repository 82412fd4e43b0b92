"""Take-over of a run's living actors by its next driver."""

import logging
from typing import Any

from autohet.driver.ray.agents.node_agents import RayNodeAgents
from autohet.driver.ray.run_actor import fingerprint
from autohet.driver.ray.run_actors import (
    AGENT,
    WORKER,
    Charge,
    LivingActor,
    answers_of,
    living_actors,
)
from autohet.driver.ray.workers import RayWorkers
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder

logger = logging.getLogger("autohet")


def take_over(
    job: Job, charge: Charge, workers: RayWorkers, agents: RayNodeAgents
) -> tuple[GenerationOrder, ...]:
    """Take over the actors of this job and code that answer; end all others of the run.

    Blocks for two heartbeat limits at most. Returns one worker's order of each generation that a
    worker has state or an order of, oldest first.
    """
    living = living_actors(charge.run_id)
    calls = {actor: actor.handle.introduce.remote() for actor in living if actor.is_up}
    patience_s = job.elastic.timeouts().heartbeat_s
    introductions = answers_of(calls, patience_s)
    own = fingerprint(job)
    kept: dict[tuple[str, str], LivingActor] = {}
    ended = []
    token = ""
    for actor in living:
        its_print, knowledge = introductions.get(actor, ("", None))
        place = (actor.kind, actor.key)
        is_fit = its_print == own and place not in kept
        if is_fit and actor.kind == AGENT:
            token = token or knowledge
            is_fit = knowledge == token
        if is_fit:
            kept[place] = actor
        else:
            ended.append(actor.handle)
    charge.kill(ended)

    by_kind: dict[str, dict[str, Any]] = {WORKER: {}, AGENT: {}}
    for (kind, key), actor in kept.items():
        by_kind[kind][key] = actor.handle
    if token:
        agents.adopt(by_kind[AGENT], token)
    workers.adopt(by_kind[WORKER])
    if living:
        logger.info(
            "Taking over %d workers and %d agents that outlived their driver; %d are ended",
            len(by_kind[WORKER]),
            len(by_kind[AGENT]),
            len(ended),
        )

    holders: dict[int, Any] = {}
    for actor in kept.values():
        if actor.kind == WORKER:
            for generation in introductions[actor][1]:
                holders.setdefault(generation, actor.handle)
    orders_of = {each: handle.order.remote(each) for each, handle in holders.items()}
    found = answers_of(orders_of, patience_s)
    orders = tuple(found[each] for each in sorted(found) if found[each] is not None)
    if orders:
        workers.note_losses(orders[-1].plan.workers)
    return orders
