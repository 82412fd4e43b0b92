"""Those who follow a run by its events: one protocol, a thread that keeps them off the driver's
ticks, and what is built in.
"""

from autohet.driver.callbacks.dispatch import EventDispatch
from autohet.driver.callbacks.protocol import Callback

__all__ = ["Callback", "EventDispatch"]
