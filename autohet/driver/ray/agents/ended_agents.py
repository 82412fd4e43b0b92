"""Agents whose process has ended, found before Ray names them: nothing listens at their port."""

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autohet.driver.ray.reports.newest_reports import LatestReport
from autohet.runtime.messages import AgentEndpoint

CONNECT_S = 2.0
"""Limit on a connection; an address that does not answer proves nothing."""


@dataclass
class _Probe:
    """Attempt to connect to an agent whose connection for reports ended at `broke_off_at`."""

    broke_off_at: float
    is_refused: bool = False


class EndedAgents:
    """Finds agents whose end the network shows; called from the driver's thread, never waits.

    The end of a connection alone may be the network's. If the agent's machine also refuses a new
    connection to the port that the agent served, the process has ended. wake: called by a thread
    once that is known.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._probes: dict[str, _Probe] = {}

    def find(self, answers: Mapping[str, LatestReport]) -> list[str]:
        """Return the nodes whose agents have ended for certain; ask about others."""
        broken = {}
        for node, answer in answers.items():
            if answer.broke_off_at is not None and answer.error is None and answer.value:
                broken[node] = answer
        self._probes = {node: probe for node, probe in self._probes.items() if node in broken}

        found = []
        for node, answer in broken.items():
            assert answer.broke_off_at is not None
            probe = self._probes.get(node)
            if probe is None or probe.broke_off_at != answer.broke_off_at:
                probe = self._probes[node] = _Probe(answer.broke_off_at)
                self._begin(probe, answer.value.endpoint)
            elif probe.is_refused:
                found.append(node)
        return found

    def _begin(self, probe: _Probe, endpoint: AgentEndpoint) -> None:
        def connect() -> None:
            try:
                socket.create_connection((endpoint.host, endpoint.port), CONNECT_S).close()
            except ConnectionRefusedError:
                probe.is_refused = True
                self._wake()
            except OSError:
                pass

        threading.Thread(target=connect, name=f"looking for {endpoint.node}", daemon=True).start()
