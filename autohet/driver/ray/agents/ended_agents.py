"""Agents whose process has ended, found before Ray names them: nothing listens at their port."""

import socket
import threading
from collections.abc import Callable, Mapping

from autohet.driver.ray.reports.newest_reports import LatestReport
from autohet.runtime.messages import AgentEndpoint

CONNECT_S = 2.0
"""Limit on a connection; an address that does not answer proves nothing."""


class EndedAgents:
    """Finds agents whose end the network shows; called from the driver's thread, never waits.

    The end of a connection alone may be the network's. If the agent's machine also refuses a new
    connection to the port that the agent served, the process has ended. wake: called by a thread
    once that is known.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._refusals: dict[tuple[str, float], threading.Event] = {}
        """Of each agent and end of its connection: set once its machine has refused another."""

    def find(self, answers: Mapping[str, LatestReport]) -> list[str]:
        """Return the nodes whose agents have ended for certain; ask about others."""
        broken = {}
        for node, answer in answers.items():
            if answer.broke_off_at is not None and answer.error is None and answer.value:
                broken[node, answer.broke_off_at] = answer.value.endpoint
        self._refusals = {end: refused for end, refused in self._refusals.items() if end in broken}
        found = [node for (node, _), refused in self._refusals.items() if refused.is_set()]
        for end, endpoint in broken.items():
            if end not in self._refusals:
                self._refusals[end] = self._begin(endpoint)
        return found

    def _begin(self, endpoint: AgentEndpoint) -> threading.Event:
        """Begin to connect to an agent; return what is set if that is refused."""
        refused = threading.Event()

        def connect() -> None:
            try:
                socket.create_connection((endpoint.host, endpoint.port), CONNECT_S).close()
            except ConnectionRefusedError:
                refused.set()
                self._wake()
            except OSError:
                pass

        threading.Thread(target=connect, name=f"looking for {endpoint.node}", daemon=True).start()
        return refused
