"""How a generation ends for a worker that is in it."""


class Interrupted(Exception):
    """The generation was told to end while this worker was in it."""


class PeerLost(Exception):
    """An operation failed or took longer than its deadline: a peer is dead, frozen or has left."""
