"""Dollars that a run has spent and its first start, in its checkpoint storage.

A driver that is started again, on another machine too, goes on from them.
"""

import json
import logging
from dataclasses import asdict, dataclass

from recovery.checkpoint.epoch import require_epoch
from recovery.errors import RecoveryError
from recovery.storage.errors import ObjectMissing
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")

SPENDING = "spending.json"
EVERY_S = 60.0
"""Seconds between two stores."""
LONGEST_GAP_S = 600.0
"""Longest time without a driver, in seconds, for which nodes are taken to have been paid.

An autoscaler ends idle nodes within minutes.
"""


@dataclass(frozen=True)
class Spending:
    """Spent dollars at `time`, and the price of all nodes then.

    started, time: seconds since the epoch.
    """

    started: float
    time: float
    usd: float = 0.0
    usd_per_hour: float = 0.0

    def usd_until(self, now: float) -> float:
        """Return the dollars spent until `now`, with those of the time without a driver."""
        gap_s = min(LONGEST_GAP_S, max(0.0, now - self.time))
        return self.usd + self.usd_per_hour * gap_s / 3600.0


def read_spending(storage: Storage) -> Spending | None:
    """Return what earlier drivers of this run have spent; None without any.

    Raises:
        StorageError: the storage does not answer.
    """
    try:
        return Spending(**json.loads(bytes(storage.get(SPENDING))))
    except ObjectMissing:
        return None
    except (ValueError, TypeError) as error:
        logger.warning(
            "%s of %s is damaged (%s): nothing counts as spent", SPENDING, storage, error
        )
        return None


def store_spending(storage: Storage, spending: Spending, epoch: int = 0) -> None:
    """Store what is spent; a failure is logged, and the next store replaces it.

    epoch: that of the driver, which stores nothing once a later one has taken over; 0: unknown.
    """
    try:
        require_epoch(storage, epoch)
        storage.put(SPENDING, json.dumps(asdict(spending)).encode())
    except (RecoveryError, OSError) as error:
        logger.warning("The dollars spent so far are not in the checkpoint storage: %s", error)
