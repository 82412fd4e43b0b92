"""Choice of this machine's metadata service: the first of the clouds' that answers."""

from collections.abc import Callable, Mapping, Sequence

from autohet.runtime.process.azure_metadata import AzureMetadata
from autohet.runtime.process.google_metadata import GoogleMetadata
from autohet.runtime.process.instance_metadata import InstanceMetadata
from autohet.runtime.process.metadata_server import (
    CloudMetadata,
    InstanceFacts,
    MetadataUnavailable,
)

CLOUDS: Mapping[str, Callable[[], CloudMetadata]] = {
    "aws": InstanceMetadata,
    "google": GoogleMetadata,
    "azure": AzureMetadata,
}
"""Client of each cloud's metadata service, by the name of the source of notices."""


def find_cloud(clients: Sequence[CloudMetadata]) -> tuple[CloudMetadata, InstanceFacts]:
    """Return the client whose service answers, and what it says of this instance.

    All clouds serve metadata at one address, in ways that the others' servers refuse.

    Raises:
        MetadataUnavailable: none answers; normal outside these clouds.
    """
    reasons = []
    for client in clients:
        try:
            return client, client.facts()
        except MetadataUnavailable as error:
            reasons.append(f"{client.source}: {error}")
    raise MetadataUnavailable("; ".join(reasons))
