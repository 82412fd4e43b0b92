"""Connection of a worker to the rendezvous store of its generation."""

from datetime import timedelta

from torch.distributed import TCPStore

from autohet.runtime.messages import GenerationOrder, PreparationOrder
from autohet.runtime.process.store_tunnel import StoreTunnel


class StoreConnector:
    """Maker of a worker's connections to each generation's store; owns the tunnel to it.

    limit_s: limit on connecting, and on the store's answers.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._tunnel: StoreTunnel | None = None

    def connect(self, order: GenerationOrder | PreparationOrder) -> TCPStore:
        """Connect to the order's store, through a new tunnel if the order has a secret."""
        host = order.store_host
        port = order.store_port
        if order.store_secret:
            tunnel = StoreTunnel(host, port, order.generation, order.store_secret, self._limit_s)
            host = tunnel.host
            port = tunnel.port
            self.close()
            self._tunnel = tunnel
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self._limit_s))

    def close(self) -> None:
        """Close the tunnel, if there is one."""
        if self._tunnel is not None:
            self._tunnel.close()
