"""Ports of Ray's agents on an emulated machine: without them a raylet aborts on a busy machine."""

import socket
from typing import Any

import pytest

from autohet.driver.emulated.fleet import AGENT_PORTS, EmulatedFleet, _start_process


def test_agents_can_listen_where_nobody_else_is_given_a_port() -> None:
    """Wrong: ports that are let go, which another fleet on this machine is given as well."""
    fleets = [EmulatedFleet({}), EmulatedFleet({})]
    ports = [fleet._reserve_ports() for fleet in fleets for _ in range(2)]
    assert all(tuple(each) == AGENT_PORTS for each in ports)
    numbers = [port for each in ports for port in each.values()]
    assert len(set(numbers)) == len(numbers)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", numbers[0]))
    with socket.create_server(("", numbers[0])), socket.create_server(("127.0.0.1", numbers[1])):
        pass
    for fleet in fleets:
        fleet.close()
    with socket.socket() as other:
        other.bind(("", numbers[0]))


@pytest.mark.parametrize(
    ("command", "added"),
    [
        (["raylet", "--agent=python agent.py --listen-port=7001 --x=1"], ["7001"]),
        (["raylet", "--agent=python agent.py --listen-port=0 --x=1"], []),
        (["gcs_server", "--port=7001"], []),
    ],
)
def test_a_raylet_is_told_where_its_agent_listens(command: list[str], added: list[str]) -> None:
    def popen(command: list[str], **options: Any) -> tuple[list[str], Any]:
        return command, options

    found, options = _start_process(popen, command, cwd=None)
    assert found == command + [f"--dashboard_agent_listen_port={each}" for each in added]
    assert options == {"process_group": 0, "cwd": None}
