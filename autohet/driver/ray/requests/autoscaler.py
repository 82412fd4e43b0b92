"""Ray's autoscaler as a job uses it: drains, and the standing request for nodes."""

from collections.abc import Mapping

from autohet.driver.ray.observer import RayObserver
from autohet.driver.ray.requests.drain import drain
from autohet.driver.ray.requests.launches import LaunchWatch
from autohet.driver.ray.requests.pods import pods_of_this_cluster
from autohet.driver.ray.requests.scaling import FleetRequest
from autohet.driver.ray.run_actors import Charge


class RayAutoscaler:
    """Implements `Autoscaler` over Ray; no-op once a later driver has taken over."""

    def __init__(self, observer: RayObserver, charge: Charge) -> None:
        self._observer = observer
        self._charge = charge
        self._request: FleetRequest | None = None

    def set_request(self, request: FleetRequest) -> None:
        """Set the request to the autoscaler, which the controller changes from now on."""
        self._request = request
        pods = pods_of_this_cluster()
        if pods is None:
            self._observer.launches = LaunchWatch()
        else:
            self._observer.launches = LaunchWatch(pods=pods.starting, close=pods.close)
        self._observer.spot_types = request.spot_types

    def ask_for_nodes(self, counts: Mapping[str, int]) -> None:
        if self._request is not None:
            self._request.change(counts)

    def drain(self, node: str, reason: str, deadline: float | None) -> None:
        """Drain the node, unless Ray drains it already or its end is only rehearsed."""
        observer = self._observer
        tracked = observer.nodes.get(node)
        if tracked is None or node in observer.scripted.by_node or not self._charge.is_mine:
            return
        node_id = tracked.ray_node.node_id
        if node_id in observer.drains.known:
            return
        left_s = None
        if deadline is not None:
            left_s = deadline - observer.clock()
        drain(node_id, reason, left_s)

    def give_back(self, node: str) -> None:
        """Give an idle node back: Ray drains it, which shows as its notice.

        The head stays: no autoscaler ends it, and the driver runs there.
        """
        tracked = self._observer.nodes.get(node)
        if tracked is not None and not tracked.ray_node.is_head and self._charge.is_mine:
            drain(tracked.ray_node.node_id, "idle", None)
