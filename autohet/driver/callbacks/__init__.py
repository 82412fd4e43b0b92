"""Callbacks that follow a run by its events.

The package has one protocol, a thread that keeps callbacks off the driver's ticks, and the built-in
callbacks.
"""

from autohet.driver.callbacks.dispatch import EventDispatch
from autohet.driver.callbacks.protocol import Callback

__all__ = ["Callback", "EventDispatch"]
