"""Figures of a run as Ray metrics.

Ray's Prometheus endpoint serves them and `cluster_configs/grafana-dashboard.json` draws them. Ray
puts `ray_` before each name, and `_total` behind a counter's. All carry `job`.
"""

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from autohet.driver.events.living_nodes import LivingNodes
from autohet.driver.events.zone_bill import ZoneBill
from planner.inputs.zones import GB

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "autohet_step": ("Steps whose update is applied", ()),
    "autohet_loss": ("Loss of the newest step", ()),
    "autohet_evaluation_loss": ("Loss of the newest evaluation", ()),
    "autohet_learning_rate": ("Learning rate of the newest step", ()),
    "autohet_tokens_per_s": ("Tokens a second in the newest step", ()),
    "autohet_gpus": ("GPUs of living nodes", ("gpu_type",)),
    "autohet_usd_per_hour": ("Price of the living nodes, as far as it is known", ()),
    "autohet_usd_per_million_tokens": (
        "Price of the living nodes over the newest step's tokens a second",
        (),
    ),
    "autohet_generation": ("Number of the newest reconfiguration", ()),
    "autohet_checkpoint_step": ("Step of the newest durable checkpoint", ()),
    "autohet_goodput": ("Part of the time so far in which steps that count were computed", ()),
}
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "autohet_steps": ("Steps run, those that were run again too", ()),
    "autohet_tokens": ("Tokens of those steps", ()),
    "autohet_changes": ("Reconfigurations", ("cause",)),
    "autohet_lost_seconds": ("Seconds without a step, in reconfigurations", ("cause",)),
    "autohet_lost_steps": ("Steps that were run again", ("cause",)),
    "autohet_stalled_seconds": ("Seconds between steps, beyond a usual step", ("cause",)),
    "autohet_redone_seconds": ("Seconds of work that was done again", ("cause",)),
    "autohet_lost_usd": ("Price of the nodes in these seconds", ("cause",)),
    "autohet_moved_bytes": ("Bytes of training state that restores took", ("tier",)),
    "autohet_saved_bytes": (
        "Bytes of training state uploaded, copied to other nodes and spilled to nodes' disks",
        ("tier",),
    ),
    "autohet_zone_gigabytes": (
        "Gigabytes between zones: of training by its plans, of copies to other nodes as sent",
        ("zones", "use"),
    ),
    "autohet_zone_usd": ("Price of these gigabytes", ("zones", "use")),
}


class RayMetrics:
    """Callback that exports metrics; the process must be connected to Ray."""

    def __init__(self, job: str) -> None:
        self._tags = {"job": job}
        self._gauges = {}
        for name, (description, keys) in GAUGES.items():
            tag_keys = ("job", *keys)
            self._gauges[name] = Gauge(name, description, tag_keys)
        self._counters = {}
        for name, (description, keys) in COUNTERS.items():
            tag_keys = ("job", *keys)
            self._counters[name] = Counter(name, description, tag_keys)
        self._living = LivingNodes()
        self._zones = ZoneBill()
        self._types: set[str] = set()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Set the gauges and raise the counters that this event changes."""
        if self._living.take(event):
            gpus = self._living.gpus_by_type()
            self._types |= gpus.keys()
            for gpu_type in self._types:
                self._set("autohet_gpus", gpus[gpu_type], gpu_type=gpu_type)
            self._set("autohet_usd_per_hour", self._living.usd_per_hour)
        self._set("autohet_generation", event["generation"])
        for carried in self._zones.take(event):
            tags = {"zones": carried.name, "use": carried.use}
            self._count("autohet_zone_gigabytes", carried.num_bytes / GB, **tags)
            self._count("autohet_zone_usd", carried.usd, **tags)

        match event["kind"]:
            case "step":
                self._take_step(event)
            case "reconfigure":
                cause = event["cause"]
                seconds = event["seconds"]
                self._count("autohet_changes", 1, cause=cause)
                self._count("autohet_lost_seconds", seconds["total"], cause=cause)
                self._count("autohet_lost_steps", event["steps_lost"], cause=cause)
                self._count("autohet_stalled_seconds", seconds["stalled"], cause=cause)
                self._count("autohet_redone_seconds", seconds["redone"], cause=cause)
                self._count("autohet_lost_usd", event["usd_lost"] or 0.0, cause=cause)
                if event["goodput"] is not None:
                    self._set("autohet_goodput", event["goodput"])
            case "restore":
                for tier, num_bytes in event["bytes_by_tier"].items():
                    self._count("autohet_moved_bytes", num_bytes, tier=tier)
            case "transfers":
                for part in event["transfers"]:
                    self._count("autohet_saved_bytes", part["bytes"], tier=part["tier"])
            case "evaluation":
                self._set("autohet_evaluation_loss", event["evaluation_loss"])
            case "checkpoint":
                self._set("autohet_checkpoint_step", event["step"])

    def close(self) -> None:
        """Set the gauges of throughput, price and GPUs to zero at the end of the run."""
        self._set("autohet_tokens_per_s", 0.0)
        self._set("autohet_usd_per_hour", 0.0)
        for gpu_type in self._types:
            self._set("autohet_gpus", 0, gpu_type=gpu_type)

    def _take_step(self, event: Mapping[str, Any]) -> None:
        self._count("autohet_steps", 1)
        self._count("autohet_tokens", event["tokens"])
        self._set("autohet_step", event["step"] + 1)
        if event["loss"] is not None:
            self._set("autohet_loss", event["loss"])
        if event.get("learning_rate") is not None:
            self._set("autohet_learning_rate", event["learning_rate"])
        if event["seconds"]:
            tokens_per_s = event["tokens"] / event["seconds"]
            self._set("autohet_tokens_per_s", tokens_per_s)
            if tokens_per_s:
                usd_per_s = self._living.usd_per_hour / 3600
                usd_per_token = usd_per_s / tokens_per_s
                self._set("autohet_usd_per_million_tokens", usd_per_token * 1e6)

    def _set(self, name: str, value: float, **tags: str) -> None:
        all_tags = {**self._tags, **tags}
        self._gauges[name].set(value, all_tags)

    def _count(self, name: str, value: float, **tags: str) -> None:
        # Ray's counters raise an error for zero.
        if value > 0:
            all_tags = {**self._tags, **tags}
            self._counters[name].inc(value, all_tags)
