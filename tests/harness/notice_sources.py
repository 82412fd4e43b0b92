"""Every source of notices behind one interface, for one conformance test: how to make it say
something, and how to offend it.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pynvml

from autohet.control.values.observation import Notice
from autohet.driver.sources import gpu_health
from autohet.driver.sources.merge import AgentSigns, NoticeMerger
from autohet.driver.sources.node_signs import MetadataWatch
from autohet.driver.sources.protocol import NoticeSource, WatchedNode
from autohet.driver.sources.script_file import ScriptNotices
from autohet.driver.sources.simple import RayDrains, Scripted
from autohet.driver.sources.sqs_queue import QueueNotices
from autohet.runtime.process.azure_metadata import AzureMetadata
from autohet.runtime.process.google_metadata import GoogleMetadata
from tests.harness.cloud_metadata_servers import AzureServer, GoogleServer
from tests.harness.fake_nvml import FakeNvml, installed
from tests.harness.imds_server import ImdsServer
from tests.harness.waits import wait_until

MINE = "i-0123456789abcdef0"
OTHER = "i-0aaaaaaaaaaaaaaaa"
DEEP = "[" * 60_000
CLOCK_AHEAD_S = 5000.0
"""Seconds by which the driver's clock is ahead of this process's monotonic clock in each case.

A source that ignores the driver's clock gives deadlines that are wrong by as much.
"""


def driver_now() -> float:
    """Return the time on the driver's clock."""
    return time.monotonic() + CLOCK_AHEAD_S


@dataclass
class Case:
    """A source that a test drives. say: give the node notice, gone in so many seconds; hint: say
    that it is at risk; offend: garbage, in each form that there is; repeat: the last message once
    more; of_others: the same about a machine that is not ours. None: it cannot. works: switch the
    service on (it starts switched off).
    """

    source: NoticeSource
    say: Callable[[float], None]
    works: Callable[[], None]
    hint: Callable[[], None] | None = None
    offend: Callable[[], None] | None = None
    repeat: Callable[[], None] | None = None
    of_others: Callable[[float], None] | None = None
    has_deadline: bool = True
    signs: Callable[[], tuple[Any, ...]] = tuple
    node: WatchedNode = field(default_factory=lambda: WatchedNode("n", "ray-id", MINE))
    board: NoticeMerger = field(init=False)
    nodes: list[WatchedNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = NoticeMerger([self.source])

    def look(self) -> tuple[Notice | None, Notice | None]:
        """The departure and the risk that stand of the one node."""
        now = driver_now()
        node = replace(self.node, signs=self.signs(), heard_at=now)
        self.board.look(self.nodes or [node], now)
        return self.board.departures.get("n"), self.board.risks.get("n")

    def replace_node(self) -> None:
        """Put another instance of the same name in the node's place; it sees no signs."""
        self.node = WatchedNode(self.node.name, "ray-id of the next", "i-0bbbbbbbbbbbbbbbb")
        self.signs = tuple

    def wait(self, done: Callable[[Notice | None, Notice | None], bool]) -> Notice | None:
        """Look until it is done; the departure then."""
        wait_until(lambda: done(*self.look()), type(self.source).__name__)
        return self.board.departures.get("n")

    def settle(self) -> None:
        """Long enough for a source that is asked every 20 ms to have swallowed what it was
        given.
        """
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            self.look()
            time.sleep(0.01)


def iso(in_s: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=in_s)).isoformat().replace("+00:00", "Z")


@contextmanager
def metadata(tmp_path: Path) -> Iterator[Case]:
    with ImdsServer() as server:
        server.status_for_all = 500
        os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = server.endpoint
        watch = MetadataWatch(0.02)
        try:

            def offend() -> None:
                for nonsense in (
                    DEEP,
                    "[]",
                    '{"time": "soon"}',
                    '{"time": 1e400}',
                    "\x00",
                    '{"action": {}}',
                ):
                    for path in ("spot/instance-action", "events/recommendations/rebalance"):
                        server.values[path] = nonsense
                    time.sleep(0.06)
                del server.values["events/recommendations/rebalance"]

            yield Case(
                AgentSigns(),
                say=lambda in_s: server.interrupt(time.time() + in_s),
                works=lambda: setattr(server, "status_for_all", None),
                hint=lambda: server.recommend_rebalance(time.time()),
                offend=offend,
                signs=watch.signs,
            )
        finally:
            watch.close()
            del os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"]


@contextmanager
def google(tmp_path: Path) -> Iterator[Case]:
    """Host maintenance names its moment; `preempted`, which names none, has tests of its own."""
    with GoogleServer() as server:
        server.status_for_all = 500
        watch = MetadataWatch(0.02, [GoogleMetadata(server.endpoint)])
        try:

            def offend() -> None:
                for nonsense in (DEEP, "[]", '{"window_start_time": "soon"}', "\x00", "{}"):
                    server.values["upcoming-maintenance"] = nonsense
                    time.sleep(0.06)
                del server.values["upcoming-maintenance"]
                for key, sound in (("preempted", "FALSE"), ("maintenance-event", "NONE")):
                    server.values[key] = "perhaps"
                    time.sleep(0.06)
                    server.values[key] = sound

            yield Case(
                AgentSigns(),
                say=lambda in_s: server.plan_maintenance(time.time() + in_s),
                works=lambda: setattr(server, "status_for_all", None),
                hint=lambda: server.plan_maintenance(time.time() + 7 * 86400),
                offend=offend,
                signs=watch.signs,
            )
        finally:
            watch.close()


@contextmanager
def azure(tmp_path: Path) -> Iterator[Case]:
    with AzureServer() as server:
        server.status_for_all = 500
        watch = MetadataWatch(0.02, [AzureMetadata(server.endpoint)])
        mine = server.compute["name"]
        try:

            def offend() -> None:
                for nonsense in (DEEP, "[]", '{"Events": {}}', "\x00", '{"Events": [1, {}]}'):
                    server.raw = nonsense
                    time.sleep(0.06)
                server.raw = None
                server.announce("Preempt", time.time() + 30, mine, NotBefore="soon")
                server.events.append({"Resources": [mine], "EventStatus": "Canceled"})

            yield Case(
                AgentSigns(),
                say=lambda in_s: server.announce("Preempt", time.time() + in_s, mine) and None,
                works=lambda: setattr(server, "status_for_all", None),
                hint=lambda: server.announce("Freeze", time.time() + 900, mine) and None,
                offend=offend,
                of_others=lambda in_s: (
                    server.announce("Preempt", time.time() + in_s, "pool_31") and None
                ),
                signs=watch.signs,
            )
        finally:
            watch.close()


class FakeQueue:
    """Implements the two calls of boto3's SQS client that are used; the real protocol is tested
    against moto (test_aws_scripts).
    """

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.deleted = 0
        self.works = False

    def receive_message(self, **_: Any) -> dict[str, Any]:
        if not self.works:
            raise ConnectionError("no queue")
        taken, self.waiting = self.waiting[:10], self.waiting[10:]
        return {"Messages": [{"Body": body, "ReceiptHandle": "h"} for body in taken]}

    def delete_message(self, **_: Any) -> None:
        self.deleted += 1


ACCOUNT = "123456789012"
QUEUE_URL = f"https://sqs.us-east-1.amazonaws.com/{ACCOUNT}/q"


def ec2_event(kind: str, instance: str, event_id: str, age_s: float = 0.0, **detail: str) -> str:
    return json.dumps(
        {
            "version": "0",
            "id": event_id,
            "detail-type": kind,
            "source": "aws.ec2",
            "account": ACCOUNT,
            "time": iso(-age_s),
            "detail": {"instance-id": instance, **detail},
        }
    )


def foreign_events() -> list[str]:
    """Interruption warnings that a queue may carry and that must not count: of another account
    and from the future.
    """
    warning = json.loads(ec2_event("EC2 Spot Instance Interruption Warning", MINE, "foreign"))
    accounts = ["210987654321", 123456789012, [ACCOUNT], ""]
    documents = [{**warning, "account": account} for account in accounts]
    documents += [{**warning, "time": iso(ahead_s)} for ahead_s in (60, 3600, 3e8)]
    return [json.dumps(document) for document in documents]


@contextmanager
def queue(tmp_path: Path) -> Iterator[Case]:
    """A warning of the queue is always two minutes ahead of the end: a nearer one was sent
    earlier.
    """
    fake = FakeQueue()
    sent = []

    def send(in_s: float, instance: str) -> None:
        warning = "EC2 Spot Instance Interruption Warning"
        sent.append(
            ec2_event(
                warning, instance, f"id-{len(sent)}", 120 - in_s, **{"instance-action": "terminate"}
            )
        )
        fake.waiting.append(sent[-1])

    def offend() -> None:
        fake.waiting += [
            DEEP,
            "",
            "null",
            '{"detail": 1}',
            ec2_event("x", MINE, "odd"),
            sent[-1][:-3] if sent else "{",
        ]
        fake.waiting.append(
            json.dumps(
                {
                    "id": 1,
                    "detail-type": "EC2 Spot Instance Interruption Warning",
                    "source": "aws.ec2",
                    "time": "9" * 400,
                    "detail": {"instance-id": MINE},
                }
            )
        )
        fake.waiting.append(
            json.dumps(
                {
                    **json.loads(ec2_event("EC2 Spot Instance Interruption Warning", MINE, "x")),
                    "source": "evil",
                }
            )
        )
        fake.waiting += foreign_events()
        fake.waiting.append(
            ec2_event("EC2 Spot Instance Interruption Warning", MINE, "of last year", 3e7)
        )

    source = QueueNotices(QUEUE_URL, lambda url: fake, 0.02)
    try:
        yield Case(
            source,
            say=lambda in_s: send(in_s, MINE),
            works=lambda: setattr(fake, "works", True),
            hint=lambda: fake.waiting.append(
                ec2_event("EC2 Instance Rebalance Recommendation", MINE, "risk")
            ),
            offend=offend,
            repeat=lambda: fake.waiting.append(sent[-1]),
            of_others=lambda in_s: send(in_s, OTHER),
        )
    finally:
        source.close()


@contextmanager
def script_file(tmp_path: Path) -> Iterator[Case]:
    path = tmp_path / "notices.jsonl"
    lines: list[str] = []

    def write(**document: Any) -> None:
        lines.append(json.dumps(document))
        with path.open("a") as file:
            file.write(lines[-1] + "\n")

    def offend() -> None:
        with path.open("ab") as file:
            file.write(
                b"\xff\xfe\n[]\nnull\n{}\n"
                + DEEP.encode()
                + b'\n{"node": 3}\n{"node": "n", "in_s": "soon"}\n{"node": "n", "in_s": 1e400}\n'
            )

    source = ScriptNotices(str(path), None, 0.02)
    try:
        yield Case(
            source,
            say=lambda in_s: write(node="n", in_s=in_s, nonce=len(lines)),
            works=lambda: path.touch(),
            hint=lambda: write(instance=MINE, risk=True),
            offend=offend,
            repeat=lambda: path.write_text(lines[-1] + "\n"),
            of_others=lambda in_s: write(node="of another job", in_s=in_s),
        )
    finally:
        source.close()


@contextmanager
def drains(tmp_path: Path) -> Iterator[Case]:
    found: dict[str, float | None] = {}
    works = []

    def read() -> dict[str, float | None]:
        if not works:
            raise RuntimeError("the GCS does not answer")
        return {node: None if at is None else at - time.monotonic() for node, at in found.items()}

    yield Case(
        RayDrains(read),
        say=lambda in_s: found.update({"ray-id": time.monotonic() + in_s}),
        works=lambda: works.append(True),
        of_others=lambda in_s: found.update({"another id": time.monotonic() + in_s}),
    )


@contextmanager
def gpus(tmp_path: Path) -> Iterator[Case]:
    """SIMULATED: the real pynvml over a stand-in for the driver's library."""
    fake = FakeNvml(2)
    fake.status = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    throttled_s, gpu_health.THROTTLED_S = gpu_health.THROTTLED_S, 0.05
    with installed(fake), ExitStack() as stack:
        stack.callback(setattr, gpu_health, "THROTTLED_S", throttled_s)
        watch = gpu_health.GpuWatch(0.02)
        stack.callback(watch.close)

        def offend() -> None:
            fake.events += [13, 31, 43, 45, 2**63]  # errors of programs
            fake.ecc[0] = None

        yield Case(
            AgentSigns(),
            say=lambda in_s: fake.events.append(79),
            works=lambda: setattr(fake, "status", 0),
            hint=lambda: fake.reasons.__setitem__(1, pynvml.nvmlClocksEventReasonHwThermalSlowdown),
            offend=offend,
            repeat=lambda: fake.events.append(79),
            has_deadline=False,
            signs=watch.signs,
        )


@contextmanager
def scripted(tmp_path: Path) -> Iterator[Case]:
    source = Scripted()

    def give(in_s: float, node: str = "n") -> None:
        now = driver_now()
        source.by_node[node] = Notice(node, "scripted notice", now, now + in_s)

    yield Case(source, say=give, works=lambda: None, of_others=lambda in_s: give(in_s, "another"))


SOURCES = {
    "ray": drains,
    "aws": metadata,
    "google": google,
    "azure": azure,
    "gpu": gpus,
    "queue": queue,
    "file": script_file,
    "script": scripted,
}
"""Case of each source, by its name in `NOTICE_SOURCES`."""
