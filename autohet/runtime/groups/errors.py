"""Errors that end a generation for one of its workers."""


class Interrupted(Exception):
    """The generation was interrupted while this worker was in it."""


class PeerLost(Exception):
    """An operation failed or exceeded its deadline: a peer is dead, frozen or has left."""
