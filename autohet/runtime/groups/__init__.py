"""Process groups of one generation: every wait ends, by a deadline or by an interrupt."""

from autohet.runtime.groups.errors import Interrupted, PeerLost
from autohet.runtime.groups.generation import GenerationGroups, reconfigure
from autohet.runtime.groups.gloo import GlooGroup
from autohet.runtime.groups.group import Group
from autohet.runtime.groups.nccl import NcclGroup

__all__ = [
    "GenerationGroups",
    "GlooGroup",
    "Group",
    "Interrupted",
    "NcclGroup",
    "PeerLost",
    "reconfigure",
]
