"""Two jobs on one Ray cluster: their requests, and nodes whose GPUs the other uses."""

from dataclasses import replace
from typing import Any

from autohet.control.job_state import Waiting
from autohet.driver.ray.requests.broker import Requests
from autohet.driver.ray.worker_losses import WorkerLosses
from tests.driver.test_buying import World, aws
from tests.driver.test_controller import make, run, trained

__all__ = ["aws"]


class Memory:
    """Ray's key-value store, as far as the broker uses it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def load(self) -> dict[str, Any]:
        return dict(self.kept)

    def save(self, document: dict[str, Any]) -> None:
        self.kept = dict(document)


def test_the_autoscaler_has_the_sum_of_all_requests_and_the_ended_ones_leave() -> None:
    sent: list[Any] = []
    living = {"01", "02"}
    memory = Memory()
    requests = Requests(sent.append, lambda: set(living), memory)
    one, two = [[{"GPU": 1}, {}]], [[{"GPU": 8}, {"ray.io/accelerator-type": "A100"}]] * 2
    requests.put("01", one)
    requests.put("02", two)
    assert sent[-1] == one + two
    requests = Requests(sent.append, lambda: set(living), memory)
    requests.put("01", one * 2)
    assert sent[-1] == one * 2 + two, "a broker that was started again knows the others'"
    living.remove("02")
    requests.prune()
    assert sent[-1] == one * 2
    count = len(sent)
    requests.prune()
    assert len(sent) == count, "nothing has changed"
    requests.put("01", [])
    assert sent[-1] == []


def test_a_job_whose_gpus_another_uses_waits_and_names_it() -> None:
    controller, workforce = make(nodes=2, min_workers=2)
    workforce.waits = {"small-0": "job 'first'", "small-1": "job 'first'"}
    run(controller, lambda: "first" in getattr(controller.state, "reason", ""))
    assert isinstance(controller.state, Waiting)
    assert controller.state.reason.endswith("; job 'first' uses the GPUs of small-0, small-1")
    workforce.waits = {}
    run(controller, trained(controller, 3))


def test_a_job_trains_on_the_gpus_that_are_free_and_takes_the_others_later() -> None:
    """Wrong: it waits as long as a process may take to start, for one that will not."""
    controller, workforce = make(steps=10**6, nodes=3, worker_start_timeout_s=60)
    workforce.waits = {"small-2": "job 'first'"}
    run(controller, trained(controller, 3))
    assert workforce.now < 30.0
    workforce.waits = {}
    run(controller, lambda: "small-2/0" in controller.memory.members)


def test_a_node_that_others_use_is_not_given_back(aws: Any) -> None:
    world = World(aws, {"g6e": 2, "g5-floor": 1})
    world.busy = {"g6e-1": "job 'second'"}
    for now in range(0, 1200, 5):
        world.look(float(now), ("g6e-0/0",), g6e=2, **{"g5-floor": 1})
    assert world.released == []


def test_a_worker_that_waits_for_its_gpu_is_not_lost() -> None:
    from types import SimpleNamespace

    from autohet.driver.ray.reports.newest_reports import LatestReport
    from autohet.runtime.job.elastic import ElasticSection

    reports: Any = SimpleNamespace(answers={"a/0": LatestReport(0.0), "b/0": LatestReport(0.0)})
    losses = WorkerLosses(ElasticSection().timeouts(), SimpleNamespace(), reports)  # type: ignore[arg-type]
    losses.freezes.frozen = lambda *_: {}  # type: ignore[method-assign]
    losses.busy = {"a": "job 'first'"}
    losses.find({}, 1e4)
    assert set(losses.by_worker) == {"b/0"}
    reports.answers["a/0"] = replace(reports.answers["a/0"], error="its process died")
    losses.find({}, 1e4)
    assert set(losses.by_worker) == {"a/0", "b/0"}
