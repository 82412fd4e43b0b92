"""Options of `autohet bench recovery`, and the speeds of links in its document."""

from dataclasses import dataclass

from recovery.transfer.links import LinkRates


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    `state_bytes`: bytes of one copy of the state. `cloud` and `scale`: a cloud node's links and
    their divisor (1: the links of this machine). `step_s`: the seconds that a lost step is charged
    with. `minutes`: nothing is begun that would not end in this time.
    """

    state_bytes: float
    cloud: LinkRates
    scale: float
    step_s: float
    scenarios: tuple[str, ...]
    quick: bool
    simulate: bool
    minutes: float

    @property
    def links(self) -> LinkRates:
        """A cloud node's links, all divided by `scale`: their ratios stay."""
        cloud = self.cloud
        return LinkRates(
            cloud.memory_bytes_per_s / self.scale,
            cloud.disk_bytes_per_s / self.scale,
            cloud.network_bytes_per_s / self.scale,
            cloud.s3_bytes_per_s / self.scale,
        )


def speeds_document(links: LinkRates) -> dict[str, float]:
    return {
        "network": links.network_bytes_per_s,
        "disk": links.disk_bytes_per_s,
        "s3": links.s3_bytes_per_s,
        "memory": links.memory_bytes_per_s,
    }
