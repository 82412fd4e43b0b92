"""Rendezvous store where a generation's workers find each other.

It lives with the driver, on the node that is not spot.
"""

import secrets
from dataclasses import replace
from typing import TypeVar

from autohet.driver.ray.store.store_server import StoreServer
from autohet.runtime.messages import GenerationOrder, PreparationOrder
from autohet.runtime.process.store_tunnel import generation_secret

Order = TypeVar("Order", GenerationOrder, PreparationOrder)


class Rendezvous:
    """Rendezvous store of the whole run, reachable at `host` alone.

    Every generation has keys and a secret of its own; its orders carry the secret.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(32)
        self._server = StoreServer(host, self.key)
        self.address = (host, self._server.port)

    def with_secret(self, order: Order) -> Order:
        """Return the order with its worker's secret, which is in no observation and no record."""
        return replace(order, store_secret=generation_secret(self.key, order.generation))

    def close(self) -> None:
        self._server.close()
