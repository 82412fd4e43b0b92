"""Process groups of one generation; a deadline or an interrupt ends every wait."""

from autohet.runtime.groups.errors import Interrupted, PeerLost
from autohet.runtime.groups.generation import (
    GenerationGroups,
    GroupTimeouts,
    end_generation,
    reconfigure,
)
from autohet.runtime.groups.gloo import GlooGroup
from autohet.runtime.groups.group import Group
from autohet.runtime.groups.nccl import NcclGroup

__all__ = [
    "GenerationGroups",
    "GlooGroup",
    "Group",
    "GroupTimeouts",
    "Interrupted",
    "NcclGroup",
    "PeerLost",
    "end_generation",
    "reconfigure",
]
