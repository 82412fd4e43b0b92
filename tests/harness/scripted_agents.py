"""Agents of a scripted fleet, as `AgentCommands` asks them: a command takes effect when its agent
answers.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from autohet.control.values.observation import HeldPart, Prune
from autohet.runtime.messages import AgentEndpoint, StateTransfer
from recovery.state.holdings import Holding, Source
from tests.harness.true_copies import History, TrueCopies


@dataclass(frozen=True)
class Question:
    """An agent is its node's name."""

    number: int
    node: str
    method: str
    arguments: tuple[Any, ...] = field(compare=False)
    answered_at: float


@dataclass
class ScriptedAgents:
    """Implements `AgentCalls` over the copies that nodes truly keep. `reachable`: nodes whose agent
    answers now; `known`: those that are not known to be gone; `done`: what was handed over, from
    where and where to.
    """

    copies: TrueCopies
    clock: Callable[[], float]
    reachable: Callable[[], Collection[str]]
    known: Callable[[], Collection[str]]
    takes_s: float = 0.0
    done: list[tuple[str, str]] = field(default_factory=list)
    _questions: list[Question] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def ask(self, agent: str, method: str, *arguments: Any) -> Question:
        question = Question(
            next(self._numbers), agent, method, arguments, self.clock() + self.takes_s
        )
        self._questions.append(question)
        return question

    def take(self, asked: dict[Any, str]) -> list[tuple[str, Any]]:
        self._answer()
        found = [(asked.pop(q), self._answers.pop(q)) for q in list(asked) if q in self._answers]
        for question in [q for q in asked if q.node not in self.known()]:
            del asked[question]
        return found

    def __post_init__(self) -> None:
        self._answers: dict[Question, Any] = {}

    def _answer(self) -> None:
        """Whatever is due, wanted or not: a pruning has no one who waits for it."""
        due = [q for q in self._questions if q.answered_at <= self.clock()]
        self._questions = [
            q for q in self._questions if q.answered_at > self.clock() and q.node in self.known()
        ]
        for question in due:
            if question.node in self.reachable():
                self._answers[question] = getattr(self, f"_{question.method}")(
                    question.node, *question.arguments
                )
            elif question.node in self.known():
                self._questions.append(question)

    def _inventory(self, node: str, disk_within_s: float) -> list[Holding]:
        return [holding for holding, _ in self.copies.agents.get(node, {}).values()]

    def _refuse_copies(self, node: str) -> tuple[int, int] | None:
        self.copies.refusing.add(node)
        return max((age(source) for source in self._pushed(node)), default=None)

    def _prune(self, node: str, what: Prune) -> int:
        store = self.copies.agents.get(node, {})
        old = [s for s in store if age(s) < what.memory_before]
        for source in [s for s in old if s.name not in what.living or source_node(s) != node]:
            del store[source]
        return len(old)

    def _hand_over(
        self,
        node: str,
        parts: tuple[HeldPart, ...],
        peers: Collection[AgentEndpoint],
        timeout_s: float,
    ) -> StateTransfer:
        sent = 0
        for source, shards in parts:
            taken: tuple[Holding, History] | None = self.copies.agents.get(node, {}).get(source)
            peer = next(
                (p.node for p in peers if p.node in self.reachable() and self.copies.takes(p.node)),
                None,
            )
            if taken is None or peer is None:
                continue
            there = Source("memory", peer, source.name, source.step, source.generation)
            self.copies.keep(Holding(there, frozenset(shards)), taken[1])
            self.done.append((node, peer))
            sent += len(shards)
        return StateTransfer("peer", node, 0, 0, sent, 0.0)

    def _pushed(self, node: str) -> list[Source]:
        return [
            source for source in self.copies.agents.get(node, {}) if source_node(source) != node
        ]


def source_node(source: Source) -> str:
    """Of the worker whose state it is."""
    return source.name.rsplit("/", 1)[0]


def age(source: Source) -> tuple[int, int]:
    return source.generation, source.step
