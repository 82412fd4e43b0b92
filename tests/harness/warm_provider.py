"""Provider of an autoscaler's nodes as processes of this machine, which fork their workers from the
session's server.
"""

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

from tests.harness.warm_ray import launching_raylets


class WarmNodeProvider(FakeMultiNodeProvider):  # type: ignore[misc]
    """Runs in the autoscaler's process, which has the launcher's environment from the head."""

    def create_node_with_resources_and_labels(self, *arguments: Any, **named: Any) -> None:
        with launching_raylets():
            super().create_node_with_resources_and_labels(*arguments, **named)
