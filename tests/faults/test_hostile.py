"""A hostile user of the machine beside a run: mutated, truncated and replayed frames and idle
sockets against the store, the report channel and peers; directories; damaged documents.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autohet.control.values.observation import Observation
from autohet.driver.ray.reports import report_server
from autohet.driver.ray.store import store_server
from autohet.runtime.messages import AgentEndpoint
from recovery.peers import server as peers_server
from tests.faults.conftest import Scene, check_outcome
from tests.harness.besieged import besiege, peer_captures, store_captures
from tests.harness.exact_job import exact_job
from tests.harness.hostile_user import Targets, hostile_user
from tests.harness.leaks import nothing_left
from tests.harness.struck_run import Strike, StruckRun


def judge(found: dict[str, Any]) -> None:
    assert found["members"]["failures"] == []
    assert found["members"]["rounds_of_work"] > 0
    assert found["attack"]["leaks"] == 0
    assert found["attack"]["directory_successes"] == []
    assert found["documents"]["other_errors"] == []
    assert found["memory_grown_kb"] < 200_000
    strangers = (
        store_server.MAX_STRANGERS + report_server.MOST_STRANGERS + peers_server.MAX_STRANGERS
    )
    assert found["descriptors_at_most"] <= strangers + 100


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory whose parents another user may pass, as those of /dev/shm and /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_short_siege(reachable: Path) -> None:
    judge(besiege(reachable, num_frames=400, num_idle=300))


@pytest.mark.slow
def test_a_long_siege(reachable: Path) -> None:
    """scripts/benchmarks/recovery/hostile.py records its figures."""
    judge(besiege(reachable, num_frames=10_000, num_idle=2_000))


@pytest.mark.slow
@pytest.mark.faults
def test_a_run_goes_on_beside_a_siege(scene: Scene, tmp_path: Path, memory: Path) -> None:
    """A worker dies while the store and every agent are attacked: the same weights, no step
    lost.
    """
    job = exact_job(tmp_path, scene.shared, memory)
    with hostile_user() as user, nothing_left(memory):
        run = StruckRun(job, tmp_path, Strike("gradient_sync", "worker", "kill"))
        begun: list[Targets] = []

        def attack(run: StruckRun, seen: Observation) -> None:
            agents = {n: v.endpoint for n, v in seen.nodes.items() if v.endpoint is not None}
            if not begun and len(agents) == len(seen.nodes):
                begun.append(targets_of(run, agents, memory))
                user.attack(begun[0])

        result = run.run(attack)
        assert result.ok, result.reason
        found = user.result(120)
    assert found["leaks"] == 0
    assert found["directory_successes"] == []
    assert result.complaints == []
    check_outcome(job.checkpoint_storage, scene.reference, result.events)
    assert result.summary["steps_lost"] == 0


def targets_of(run: StruckRun, agents: dict[str, AgentEndpoint], memory: Path) -> Targets:
    """The run's store, its agents and its snapshot directories."""
    rendezvous = run.fleet.rendezvous
    ports = {"store": rendezvous.address[1]}
    captures = {"store": store_captures(rendezvous.key)}
    for name, endpoint in agents.items():
        ports[name] = endpoint.port
        captures[name] = peer_captures("a token of another job")
    directories = [str(memory), *(str(path) for path in memory.rglob("*") if path.is_dir())]
    return Targets(
        ports=ports,
        captures=captures,
        directories=directories,
        secrets=[b"AHSNAP03".hex()],
        num_frames=2_000,
        num_idle=1_000,
    )
