"""Measuring parts: parity in bf16 and fp32, snapshots, the profile, and predictions.

Predictions are compared with measurements. Steps against a plain loop are in `steps`, small probes
in `probes`.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autohet.bench.step.sides import WORKER, one_worker_plan, our_trainer, plain, random_rows
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.messages import StepRecord
from autohet.runtime.models.config import load_config
from autohet.runtime.profiling.device_profile import ProfileRequest, measure_layers
from autohet.runtime.profiling.gpu_type import device_gpu_type
from autohet.runtime.step.device import choose_device
from autohet.runtime.step.reference import Rows
from autohet.runtime.step.trainer import StageTrainer
from planner.cost.parameters import OURS, framework_parameters
from planner.cost.prediction import Prediction
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.inputs.profile import Measurement, ProfileTable, write_profile
from planner.plans.plan import Plan
from recovery.local.snapshot import SnapshotOptions, SnapshotWriter
from scripts.benchmarks.gpu.part import Failed, Machine, PartSkipped, job_of, sized_job
from scripts.benchmarks.gpu.restores import restored

PARITY_STEPS = 5
FP32_TOLERANCE = 2e-5
BF16_TOLERANCE = 2e-2
MEASURED_STEPS = 6
STEP_ERROR = 0.05
PEAK_ERROR = 0.10
SLOWDOWN = 0.03
RESTORE_SHARE = 0.6
SNAPSHOTS = 20
SHM_SHARE = 0.9
PAGEABLE_SHARE = 0.005
"""Share of the bytes allowed to go to pageable memory.

These are digests of blocks, and ends of shards that fill no block.
"""
SMALL_COPY_BYTES = 1 << 16
"""Size in bytes below which copies to the host are not counted.

Votes, losses and norms that the host reads are smaller; a state's tensors of any size that matters
are not.
"""


def parity(machine: Machine) -> dict[str, Any]:
    """Compare losses of the same job on the device, in fp32 and bf16, with plain transformers.

    The latter runs on the CPU in fp32.
    """
    cpu = torch.device("cpu")
    found = dict[str, Any]()
    wanted = _losses(machine, "fp32", cpu, by_plain=True)
    wrong = []
    for precision, limit in (("fp32", FP32_TOLERANCE), ("bf16", BF16_TOLERANCE)):
        if precision == "bf16" and _emulates_bf16(machine):
            found[precision] = "not measured: this GPU only emulates bf16"
            continue
        losses = _losses(machine, precision, machine.device)
        error = max(abs(one - other) / other for one, other in zip(losses, wanted, strict=True))
        found |= {precision: error, f"{precision}_limit": limit}
        if error > limit:
            wrong.append(precision)
    if wrong:
        raise Failed(f"losses in {', '.join(wrong)} are not those of plain fp32 training", found)
    return found


def _emulates_bf16(machine: Machine) -> bool:
    return machine.device_type == "cuda" and torch.cuda.get_device_capability(0) < (8, 0)


def _losses(
    machine: Machine, precision: str, device: torch.device, *, by_plain: bool = False
) -> list[float]:
    job = job_of(Machine("cpu"), precision)  # the small one: the CPU has to train it too
    job = replace(job, training=replace(job.training, device=machine.device_type))  # type: ignore[arg-type]
    rows = random_rows(job, device)
    if by_plain:
        step = plain(job, device, rows)
        return [step() for _ in range(PARITY_STEPS)]
    trainer = our_trainer(job, device)
    return [trainer.train_step(rows).loss for _ in range(PARITY_STEPS)]


def snapshots(machine: Machine) -> dict[str, Any]:
    """Measure steps with a snapshot after each, and a restore from the snapshot.

    Figures: the bytes from the device to the host, the time of a step with and without a snapshot,
    and the memory that stays on the device.
    """
    job = _snapshot_job(machine)
    rows = random_rows(job, machine.device)
    layout = layout_of_plan(one_worker_plan(job), load_config(job.model, job.training))
    state_bytes = layout.bytes_of(WORKER)
    took: list[float] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        options = SnapshotOptions(on_commit=lambda step, size, seconds: took.append(seconds))
        writer = SnapshotWriter(directory, WORKER, layout, 1, options)
        try:
            trainer = our_trainer(job, machine.device, before_update=writer.wait_copied)

            def steps(count: int, *, snapshot: bool) -> float:
                return _mean_step_s(trainer, rows, writer, count, snapshot=snapshot)

            steps(2, snapshot=False)
            bare = steps(MEASURED_STEPS, snapshot=False)
            steps(2, snapshot=True)
            held = [_device_bytes(machine)]
            with_snapshot = steps(MEASURED_STEPS, snapshot=True)
            with _CopyCounter(machine) as copies:
                steps(MEASURED_STEPS, snapshot=True)
            steps(SNAPSHOTS - 2 * MEASURED_STEPS - 2, snapshot=True)
            held.append(_device_bytes(machine))
            newest = writer.files.newest
        finally:
            writer.close()
        back = restored(machine, Path(directory) / "back", WORKER, layout, trainer.state)
    copies_a_step = None
    if machine.device_type == "cuda":
        copies_a_step = copies.large_bytes / state_bytes / MEASURED_STEPS
    figures = {
        "state_bytes": state_bytes,
        "newest_step": newest,
        "step_s": bare,
        "step_with_snapshot_s": with_snapshot,
        "slowdown": with_snapshot / bare - 1,
        "snapshot_s": statistics.median(took),
        "copies_of_state_a_step": copies_a_step,
        "pageable_bytes": copies.pageable_bytes,
        "device_bytes_after_2_and_20_snapshots": held,
        **back,
        "restore_share": back["bare_copy_s"] / back["restore_s"],
    }
    _judge_snapshots(figures, trainer.step - 1)
    return figures


def _snapshot_job(machine: Machine) -> Job:
    """Return a job of 1 billion parameters if the memory file system has room for its files.

    It needs room for two steps' files, and for two of the way back.
    """
    job = sized_job(machine, "1B")
    layout = layout_of_plan(one_worker_plan(job), load_config(job.model, job.training))
    room = shutil.disk_usage("/dev/shm").free
    if 4 * layout.bytes_of(WORKER) <= SHM_SHARE * room:
        return job
    return job_of(machine, job.training.precision)


def _judge_snapshots(figures: dict[str, Any], newest: int) -> None:
    """Raise Failed if the snapshots did not do what they should."""
    ratio = figures["copies_of_state_a_step"]
    if not figures["restored"]:
        raise Failed("what was restored is not what the snapshot was made of", figures)
    copied_once = ratio is None or 0.99 < ratio < 1.01
    is_pinned = figures["pageable_bytes"] <= PAGEABLE_SHARE * figures["state_bytes"]
    if figures["newest_step"] != newest or not copied_once or not is_pinned:
        raise Failed("a step does not copy its state to pinned host memory exactly once", figures)
    before, after = figures["device_bytes_after_2_and_20_snapshots"]
    if after > before:
        raise Failed("snapshots keep memory of the device", figures)
    if ratio is not None and figures["slowdown"] > SLOWDOWN:
        raise Failed(f"steps with snapshots take more than {SLOWDOWN:.0%} longer", figures)
    if ratio is not None and figures["restore_share"] < RESTORE_SHARE:
        raise Failed(f"a restore reaches less than {RESTORE_SHARE:.0%} of a bare copy", figures)


def _mean_step_s(
    trainer: StageTrainer, rows: Rows, writer: SnapshotWriter, count: int, *, snapshot: bool
) -> float:
    """Seconds of a step, over `count` of them from begin to end: the last commit's included."""
    began = time.perf_counter()
    for _ in range(count):
        if snapshot:
            writer.start(trainer.step, trainer.state)
        trainer.train_step(rows)
    writer.wait()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def _device_bytes(machine: Machine) -> int:
    """Return the bytes of device memory that the process has reserved, without its context."""
    return torch.cuda.memory_reserved() if machine.device_type == "cuda" else 0


class _CopyCounter:
    """Counter of the bytes copied from the device to the host, by the CUDA profiler.

    Small copies are left out.
    """

    def __init__(self, machine: Machine) -> None:
        self.large_bytes = self.pageable_bytes = 0
        self._profiler: Any = None
        if machine.device_type == "cuda":
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )

    def __enter__(self) -> _CopyCounter:
        if self._profiler is not None:
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profiler is None:
            return
        torch.cuda.synchronize()
        self._profiler.__exit__(*error)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        self.large_bytes, self.pageable_bytes = bytes_to_host(events)


def bytes_to_host(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the bytes of a Chrome trace's large copies from the device to the host.

    Returns the bytes of all of them, and of those to memory that is not pinned.
    """
    all_bytes = 0
    pageable_bytes = 0
    for event in events:
        name = event.get("name", "")
        args = event.get("args", {})
        if "DtoH" not in name or "bytes" not in args:
            continue
        size = int(args["bytes"])
        if size < SMALL_COPY_BYTES:
            continue
        all_bytes += size
        if "Pageable" in name:
            pageable_bytes += size
    return all_bytes, pageable_bytes


def profile(machine: Machine) -> dict[str, Any]:
    """Measure a profile as `autohet profile` does, for the measuring job's microbatch."""
    rows = _profile_rows(machine, job_of(machine, _precision(machine)))
    layers = {}
    for row in rows:
        layers[row.layer] = {
            "forward_s": row.forward_s,
            "backward_s": row.backward_s,
            "update_s": row.update_s,
        }
    return {
        "gpu_type": rows[0].gpu_type,
        "microbatch_sequences": rows[0].microbatch_sequences,
        "layers": layers,
    }


def _precision(machine: Machine) -> str:
    """Return bf16 if the hardware has it, else fp32."""
    try:
        choose_device(machine.device_type, "bf16")
    except ValueError:
        return "fp32"
    return "bf16" if machine.device_type == "cuda" else "fp32"


def _profile_rows(machine: Machine, job: Job) -> list[Measurement]:
    assert job.parallelism.microbatch_sequences is not None
    request = ProfileRequest(
        model=job.name,
        config=load_config(job.model, job.training),
        precision=job.training.precision,
        sequence_length=job.training.sequence_length,
        microbatches=(job.parallelism.microbatch_sequences,),
        device_type=machine.device_type,
        gpu_type=device_gpu_type(machine.device_type),
        compile_blocks=job.training.compile_blocks,
    )
    found = list(measure_layers(request))
    rows = [row for row in found if isinstance(row, Measurement)]
    if len(rows) < len(found):
        raise PartSkipped("the job's microbatch does not fit on this device")
    return rows


def predicted(machine: Machine) -> dict[str, Any]:
    """Compare a run of 0.3 billion parameters with the planner's prediction.

    Compared are step seconds and the device's peak memory. The planner uses a profile measured now.
    """
    return _predicted(machine, job_of(machine, _precision(machine)))


def predicted_1b(machine: Machine) -> dict[str, Any]:
    """Compare a run of 1 billion parameters with its prediction, like `predicted`."""
    return _predicted(machine, sized_job(machine, "1B"))


def predicted_3b(machine: Machine) -> dict[str, Any]:
    """Compare a run of 3 billion parameters with its prediction, like `predicted`."""
    return _predicted(machine, sized_job(machine, "3B"))


def _predicted(machine: Machine, job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        table = Path(directory) / "profile.parquet"
        write_profile(str(table), ProfileTable(_profile_rows(machine, job)))
        prediction = predict_here(machine, job, one_worker_plan(job), table)
    figures = {
        "predicted_step_s": prediction.step_time_s,
        "predicted_peak_bytes": prediction.memory_bytes_by_worker[WORKER],
    }
    figures |= _measured(machine, job)
    figures["step_error"] = figures["predicted_step_s"] / figures["step_s"] - 1
    if machine.device_type == "cuda":
        catalogue = predict_here(machine, job, one_worker_plan(job)).step_time_s
        figures["catalogue_step_error"] = catalogue / figures["step_s"] - 1
        figures["peak_error"] = figures["predicted_peak_bytes"] / figures["peak_bytes"] - 1
        if abs(figures["step_error"]) > STEP_ERROR or abs(figures["peak_error"]) > PEAK_ERROR:
            limits = f"{STEP_ERROR:.0%} (step), {PEAK_ERROR:.0%} (peak)"
            raise Failed(f"the prediction is off by more than {limits}", figures)
    return figures


def predict_here(machine: Machine, job: Job, plan: Plan, profile: Path | None = None) -> Prediction:
    """Return what the planner expects of a plan on this machine, run by this package's runtime.

    profile: measured layer times; None: the bundled ones.
    """
    inputs = planning_inputs(job, profile=profile)
    parameters = framework_parameters(OURS, inputs.parameters)
    fleet = _fleet(machine, device_gpu_type(machine.device_type))
    return inputs.cost_model(fleet, parameters=parameters).predict(plan)


def _fleet(machine: Machine, gpu_type: str) -> Fleet:
    memory = 8 << 30
    if machine.device_type == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
    kind = NodeType(
        "here",
        gpu_type,
        1,
        memory,
        intra_node_bytes_per_s=16e9,
        inter_node_bytes_per_s=1e9,
        usd_per_hour=None,
        host_cores=os.cpu_count(),
    )
    return Fleet(0, (Node("here", kind),))


def _measured(machine: Machine, job: Job) -> dict[str, float]:
    """Measure the median step, and the peak of the device's memory.

    The peak is the allocator's, and that of the whole process.
    """
    on_gpu = machine.device_type == "cuda"
    rows = random_rows(job, machine.device)
    context = context_bytes() if on_gpu else 0
    trainer = our_trainer(job, machine.device)
    trainer.train_step(rows)
    seconds = [timed_step(machine, trainer, rows)[1] for _ in range(MEASURED_STEPS)]
    found: dict[str, float] = {"step_s": statistics.median(seconds)}
    if on_gpu:
        found |= {
            "context_bytes": context,
            "peak_bytes": torch.cuda.max_memory_reserved() + context,
            "allocated_bytes": torch.cuda.max_memory_allocated(),
        }
    return found


def timed_step(machine: Machine, trainer: StageTrainer, rows: Rows) -> tuple[StepRecord, float]:
    """Run a step; return its result and the seconds until the device has ended it."""
    began = time.perf_counter()
    result = trainer.train_step(rows)
    if machine.device_type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def context_bytes() -> int:
    """Return the bytes of device memory in use outside this process's allocator.

    The cache that the earlier profile has left is released first; peaks count from here.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    torch.cuda.reset_peak_memory_stats()
    return total - free - torch.cuda.memory_reserved()
