"""Scripted events of a rehearsal.

At known steps, a notice is given, a node is killed or frozen, or a node joins.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autohet.control.values.actions import Rehearse
from autohet.control.values.observation import Notice
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.sources.simple import Scripted
from autohet.runtime.job import ScriptedEvent
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster

logger = logging.getLogger("autohet")


def check_script(
    script: Sequence[ScriptedEvent],
    cluster: Cluster | None,
    first: dict[str, int] | None,
    num_steps: int,
) -> None:
    """Check that the events of a script can happen at all, before anything is started for them.

    `cluster`: all nodes that may exist, None if unknown. `first`: number of nodes of each type that
    an emulated fleet starts with; None for a real cluster, whose nodes have no known names before
    they are there.

    Raises:
        ConfigError: an event names a node or a type that there will not be.
    """
    kinds: list[str] | None = None
    if cluster is not None:
        kinds = sorted(kind.name for kind in cluster.node_types if kind.num_gpus)
    fleet = None if first is None else ExpectedFleet.of(first)
    for event in sorted(script, key=lambda event: event.at_step):
        where = f"elastic.script: the {event.event} at step {event.at_step}"
        if event.at_step >= num_steps:
            logger.warning("%s never comes: training.steps is %d", where, num_steps)
        if fleet is None and event.event in ("arrival", "freeze"):
            raise ConfigError(
                f"{where} can be rehearsed on an emulated fleet only; take it out, or give"
                " --cluster one"
            )
        if kinds is not None and event.node_type is not None and event.node_type not in kinds:
            raise ConfigError(
                f"{where} names node type '{event.node_type}'; the cluster has {', '.join(kinds)}"
            )
        if kinds is not None and fleet is None:
            _check_name(event, where, kinds)
        if fleet is not None:
            fleet.suffer(event, where)


def _check_name(event: ScriptedEvent, where: str, kinds: Sequence[str]) -> None:
    """Check a name in a real cluster, where it is that of a type with a number."""
    if event.node is None:
        return
    kind, _, _ = event.node.rpartition("-")
    if kind not in kinds:
        examples = ", ".join(f"{each}-0" for each in kinds)
        raise ConfigError(f"{where} names node '{event.node}'; nodes are named {examples} and on")


@dataclass
class ExpectedFleet:
    """Emulated nodes that a script expects to exist as it goes on: type by name.

    If nodes of a type die unnamed, only their number is known (`unnamed`).
    """

    nodes: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    gone: dict[str, int] = field(default_factory=dict)
    unnamed: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, first: dict[str, int]) -> ExpectedFleet:
        kind_by_name = {}
        for kind, count in first.items():
            for index in range(count):
                kind_by_name[f"{kind}-{index}"] = kind
        return cls(kind_by_name, Counter(first))

    def suffer(self, event: ScriptedEvent, where: str) -> None:
        """Apply an event to the expected fleet.

        Raises:
            ConfigError: the event cannot happen.
        """
        if event.event == "arrival":
            self._join(event, where)
        elif event.node is None:
            assert event.node_type is not None
            num_named = sum(kind == event.node_type for kind in self.nodes.values())
            if num_named <= self.unnamed[event.node_type]:
                raise ConfigError(
                    f"{where} finds no node of type '{event.node_type}'; there are"
                    f" {self._names()} then"
                )
            # A freeze stops a worker's process: its node stays.
            if event.event != "freeze":
                self.unnamed[event.node_type] += 1
        elif event.node not in self.nodes:
            why = f"; there are {self._names()} then"
            if event.node in self.gone:
                why = f", which dies at step {self.gone[event.node]}"
            raise ConfigError(f"{where} names node '{event.node}'{why}")
        elif event.event == "death":
            del self.nodes[event.node]
            self.gone[event.node] = event.at_step

    def _join(self, event: ScriptedEvent, where: str) -> None:
        assert event.node_type is not None
        name = event.node or f"{event.node_type}-{self.counts[event.node_type]}"
        if name in self.nodes:
            raise ConfigError(
                f"{where} names its node '{name}', and there is one of that name; take another name"
            )
        self.counts[event.node_type] += 1
        self.nodes[name] = event.node_type

    def _names(self) -> str:
        return ", ".join(sorted(self.nodes)) or "none"


class Rehearsal:
    """Makes scripted events happen.

    `fleet` None: a real cluster, on which only notices and deaths of workers can be rehearsed (a
    death kills processes, it takes no machine away). kill: function that ends these workers'
    processes.
    """

    def __init__(
        self,
        fleet: EmulatedFleet | None,
        scripted: Scripted,
        kill: Callable[[Sequence[str]], None],
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._scripted = scripted
        self._kill = kill
        self._clock = clock

    def happen(self, what: Rehearse) -> None:
        event = what.event
        name = what.node
        if event.event == "arrival":
            assert self._fleet is not None, "check_script lets no arrival on a real cluster pass"
            node = self._fleet.add(event.node_type or "", event.node)
            logger.info("Rehearsal: %s joins", node.name)
            return

        has_left = self._fleet is not None and name not in self._fleet.nodes
        if name is None or not what.there or has_left:
            missing = f"no node of type {event.node_type} that trains"
            if event.node:
                missing = f"no {event.node}"
            logger.warning(
                "Rehearsal: the %s at step %d does not happen: %s is there",
                event.event,
                event.at_step,
                missing,
            )
            return
        logger.info("Rehearsal: %s of %s", event.event, name)
        if event.event == "notice":
            now = self._clock()
            ends_at = now + event.deadline_s
            self._scripted.by_node[name] = Notice(name, "scripted notice", now, ends_at)
            if self._fleet is not None:
                self._fleet.doom(name, ends_at)
        elif event.event == "freeze":
            assert self._fleet is not None, "check_script lets no freeze on a real cluster pass"
            for process_id in what.processes.values():
                self._fleet.freeze(process_id)
        elif self._fleet is not None:
            self._fleet.kill(name, wait=False)
        else:
            self._kill(list(what.processes))
