"""Process groups of one generation: every wait ends, by a deadline or by an interrupt."""

from autohet.runtime.groups.errors import Interrupted, PeerLost
from autohet.runtime.groups.generation import GenerationGroups, Group

__all__ = ["GenerationGroups", "Group", "Interrupted", "PeerLost"]
