"""Workers that no retry helps: before the first training they end the job at once, later their node
is left out.
"""

from dataclasses import replace

import pytest
import torch

from autohet.control.job_state import Ended
from autohet.control.values.observation import Loss
from autohet.runtime.messages import Phase, WorkerPlace
from autohet.runtime.step.device import choose_device
from autohet.runtime.worker import Worker
from planner.errors import ConfigError
from tests.driver.test_controller import make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce

WHY = "training.device is cuda, but there is none; set training.device to cpu"


class Unfit(ScriptedWorkforce):
    """Workers of the nodes in `broken` say that they can never take part; `started` counts
    starts.
    """

    broken: tuple[str, ...] = ()
    started = 0

    def hire(self, workers):
        self.started += len(workers)
        super().hire(workers)
        for worker in workers:
            if worker.split("/")[0] in self.broken:
                process = self.processes[worker]
                process.report = replace(process.report, phase=Phase.FAILED, error=WHY, unfit=True)


def workforce(*broken: str) -> Unfit:
    made = Unfit(make()[1].kind)
    made.broken = broken
    return made


def test_a_worker_that_can_never_start_ends_the_job_at_once_and_is_not_started_again():
    controller, force = make(nodes=3, workforce=workforce("small-1"))
    run(controller, lambda: controller.ended, ticks=5)
    assert not controller.ended.ok
    assert all(word in controller.ended.reason for word in ("small-1/0", "node small-1", WHY))
    assert force.started == 3
    assert [e["reason"] for e in controller.events.records if e["kind"] == "failed"] == [
        controller.ended.reason
    ]


def test_the_failure_of_a_first_generation_that_no_retry_mends_ends_the_job():
    controller, force = make(nodes=2)
    force.builds = 10**6
    run(controller, lambda: any(p.report.phase is Phase.BUILDING for p in force.processes.values()))
    process = force.processes["small-0/0"]
    process.report = replace(
        process.report, phase=Phase.FAILED, error="no model.safetensors", unfit=True
    )
    run(controller, lambda: controller.ended, ticks=2)
    assert "small-0/0" in controller.ended.reason
    assert "no model.safetensors" in controller.ended.reason


def test_once_it_trains_an_unfit_arrival_is_left_out_with_the_reason():
    controller, force = make(nodes=2, workforce=workforce("small-9"))
    run(controller, trained(controller, 3))
    force.join("small-9")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert "small-9/0" not in {
        worker for _, plan, _ in controller.memory.plans for worker in plan.workers
    }
    told = [
        e["reason"]
        for e in controller.events.records
        if e["kind"] == "decision" and "small-9" in e["reason"]
    ]
    assert len(told) == 1
    assert WHY in told[0]


def test_where_every_node_is_unfit_nothing_is_waited_for():
    controller, force = make(nodes=2, workforce=workforce())
    force.hire = lambda workers: force.losses.update(
        {
            w: Loss(w, "it died in each of 3 starts: no libcuda", force.now, force.now, True)
            for w in workers
        }
    )
    run(controller, lambda: isinstance(controller.state, Ended), ticks=5)
    assert "no libcuda" in controller.ended.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_cuda_without_a_device_is_the_users_to_fix(tmp_path):
    from tests.harness.local_fleet import make_job

    place = WorkerPlace("a/0", "a", "A10G", str(tmp_path / "memory"), str(tmp_path / "disk"))
    with pytest.raises(ConfigError, match=r"training\.device"):
        Worker(place, make_job(tmp_path, training={"device": "cuda"}))
    assert choose_device("auto", "bf16").type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_worker_that_was_given_a_gpu_never_trains_on_the_cpu(tmp_path):
    from tests.harness.local_fleet import make_job

    place = WorkerPlace("a/0", "a", "A10G", str(tmp_path / "memory"), str(tmp_path / "disk"))
    job = make_job(tmp_path, training={"device": "auto"})
    with pytest.raises(ConfigError, match=r"given a GPU \(A10G\)"):
        Worker(place, replace(job, emulation=None))


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((8, 9), True)])
def test_bf16_is_asked_of_the_hardware(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda *_: True
    )  # as PyTorch says of a T4, which emulates it
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "some GPU")
    if fits:
        assert choose_device("auto", "bf16", "A10G").type == "cuda"
    else:
        with pytest.raises(ConfigError, match="cannot compute"):
            choose_device("auto", "bf16", "T4")


def test_workers_get_what_the_job_says_of_cuda_and_its_libraries(monkeypatch):
    from autohet.driver.ray.environment import forwarded_environment

    told = {
        "NCCL_SOCKET_IFNAME": "eth1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "9",
        "GLOO_SOCKET_IFNAME": "eth1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    told["HF_TOKEN"] = "hf_secret"
    own = {"CUDA_VISIBLE_DEVICES": "3", "NCCL_HOSTID": "here"}
    for name, value in {**told, **own}.items():
        monkeypatch.setenv(name, value)
    found = forwarded_environment()
    assert "hf_secret" not in repr({"environment": found})
    assert found.items() >= told.items()
    assert not found.keys() & own.keys()
