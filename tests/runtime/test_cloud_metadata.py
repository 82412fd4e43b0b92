"""Google's and Azure's metadata as the node's agent reads them, beside EC2's."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from autohet.driver.sources.node_signs import MetadataWatch, cloud_clients
from autohet.driver.sources.protocol import Sign
from autohet.driver.sources.watch import pause_after
from autohet.runtime.job.elastic import ElasticSection
from autohet.runtime.process.azure_metadata import AzureMetadata
from autohet.runtime.process.cloud_metadata import CLOUDS, find_cloud
from autohet.runtime.process.google_metadata import GoogleMetadata
from autohet.runtime.process.metadata_server import InstanceFacts, MetadataUnavailable
from planner.errors import ConfigError
from tests.harness.cloud_metadata_servers import AzureServer, GoogleServer
from tests.harness.imds_server import ImdsServer
from tests.harness.waits import wait_until

FACTS = {
    "aws": InstanceFacts("i-0123456789abcdef0", "g5.xlarge", "us-east-1a", "spot"),
    "google": InstanceFacts(
        "4520031799277581759", "g2-standard-4", "us-central1-a", "spot", "trainer-0", "google"
    ),
    "azure": InstanceFacts(
        "5c08b38e-4d57-4c23-ac45-aca61037f084",
        "Standard_NC24ads_A100_v4",
        "westeurope-2",
        "spot",
        "pool_3",
        "azure",
    ),
}
SERVERS: dict[str, Callable[[], ImdsServer]] = {
    "aws": ImdsServer,
    "google": GoogleServer,
    "azure": AzureServer,
}


@pytest.mark.parametrize("cloud", sorted(SERVERS))
def test_the_service_that_answers_is_this_machines(
    cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients ask one server, as all clouds share one address; each server refuses the others'
    requests.
    """
    with SERVERS[cloud]() as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.endpoint)
        monkeypatch.setenv("GCE_METADATA_HOST", server.endpoint.removeprefix("http://"))
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", server.endpoint)
        for order in (list(CLOUDS), list(reversed(CLOUDS))):
            client, facts = find_cloud([CLOUDS[name]() for name in order])
            assert type(client) is CLOUDS[cloud]
            assert facts == FACTS[cloud]


def test_a_cloud_that_the_job_does_not_name_is_not_asked() -> None:
    clients = cloud_clients(ElasticSection(notice_sources=("azure", "ray"), preemption_s=7))
    assert [type(client) for client in clients] == [AzureMetadata]
    google = cloud_clients(ElasticSection(preemption_s=120))[1]
    assert isinstance(google, GoogleMetadata)
    assert google.notice_s == 120


@contextmanager
def watching(client: GoogleMetadata | AzureMetadata) -> Iterator[MetadataWatch]:
    watch = MetadataWatch(0.02, [client])
    try:
        wait_until(lambda: watch.facts is not None, "the facts")
        yield watch
    finally:
        watch.close()


def signs_when(watch: MetadataWatch, done: Callable[[tuple[Sign, ...]], bool]) -> tuple[Sign, ...]:
    wait_until(lambda: done(watch.signs()), "its signs")
    return watch.signs()


@pytest.mark.parametrize("notice_s", [30.0, 120.0])
def test_googles_preemption_counts_from_when_it_is_first_seen(notice_s: float) -> None:
    with GoogleServer() as server:
        client = GoogleMetadata(server.endpoint)
        client.notice_s = notice_s
        with watching(client) as watch:
            server.values["preempted"] = "TRUE"
            (first,) = signs_when(watch, bool)
            assert (first.text, first.risk) == ("preempted", False)
            assert first.in_s is not None
            assert notice_s - 20 < first.in_s <= notice_s
            time.sleep(0.2)
            (later,) = watch.signs()
            assert later.in_s is not None
            assert later.in_s <= first.in_s - 0.2, "each poll would begin a new countdown"


def test_what_googles_other_keys_hold_hides_no_preemption() -> None:
    """Wrong: a maintenance event that nobody knows makes the whole poll a failure."""
    with GoogleServer() as server:
        client = GoogleMetadata(server.endpoint)
        server.values |= {"preempted": "TRUE", "maintenance-event": "NEW_KIND_OF_EVENT"}
        assert [notice.action for notice in client.notices()] == ["preempted"]


def test_a_poll_begins_an_interval_after_the_one_before() -> None:
    """Wrong: what an answer takes is added to the interval, and so to each notice."""
    assert pause_after(0.5, 0.2) == pytest.approx(0.3)
    assert pause_after(0.5, 3.0) == pytest.approx(0.05), "a slow service is not asked without pause"


def test_googles_maintenance_of_a_machine_that_migrates_is_a_risk() -> None:
    with GoogleServer() as server:
        server.values["scheduling/on-host-maintenance"] = "MIGRATE"
        with watching(GoogleMetadata(server.endpoint)) as watch:
            server.values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
            (sign,) = signs_when(watch, bool)
            assert sign.risk
            server.values["maintenance-event"] = "NONE"
            server.plan_maintenance(time.time() + 600)
            (sign,) = signs_when(watch, lambda signs: "host maintenance" in [s.text for s in signs])
            assert sign.risk


def test_googles_maintenance_that_ends_the_machine_has_its_windows_date() -> None:
    """Machines with GPUs hear of it an hour before; without a window a minute is all that is
    sure.
    """
    with GoogleServer() as server, watching(GoogleMetadata(server.endpoint)) as watch:
        server.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        (sign,) = signs_when(watch, bool)
        assert not sign.risk
        assert sign.in_s is not None
        assert 30 < sign.in_s <= 60
        server.plan_maintenance(time.time() + 3000)
        far = lambda signs: bool(signs) and (signs[0].in_s or 0) > 100  # noqa: E731
        (sign,) = signs_when(watch, far)
        assert not sign.risk
        assert sign.in_s is not None
        assert 2900 < sign.in_s <= 3000
        server.plan_maintenance(time.time() - 60, "ONGOING")
        signs_when(watch, lambda signs: bool(signs) and signs[0].in_s == 0)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_is_told_when_the_node_has_left(kind: str) -> None:
    with AzureServer() as server, watching(AzureMetadata(server.endpoint)) as watch:
        server.announce(kind, time.time() + 300, "pool_30", "pool_4")
        event_id = server.announce(kind, time.time() + 300, "pool_2", "pool_3")
        (sign,) = signs_when(watch, bool)
        assert (sign.text, sign.risk, sign.wants_answer) == (kind, False, True)
        assert sign.in_s is not None
        assert 280 < sign.in_s <= 300
        assert server.acknowledged == [], "an event that is acknowledged begins at once"
        watch.acknowledge()
        assert server.acknowledged == [event_id]
        signs_when(watch, lambda signs: bool(signs) and signs[0].in_s == 0)
        assert not watch.signs()[0].wants_answer


def test_azures_events_that_leave_the_node_alive_are_risks_and_not_acknowledged() -> None:
    with AzureServer() as server, watching(AzureMetadata(server.endpoint)) as watch:
        server.announce("Freeze", time.time() + 900, "pool_3")
        server.announce("Defragment", time.time() + 900, "pool_3")
        server.announce("Redeploy", time.time() + 7 * 86400, "pool_3")
        signs = signs_when(watch, lambda signs: len(signs) == 3)
        assert [(sign.text, sign.risk) for sign in signs] == [
            ("Freeze", True),
            ("Defragment", True),
            ("Redeploy", True),
        ]
        assert not any(sign.wants_answer for sign in signs)


def test_facts_of_azure_do_not_wait_for_its_first_events() -> None:
    with AzureServer() as server:
        server.events_enabled.clear()
        try:
            with watching(AzureMetadata(server.endpoint, timeout_s=0.1)) as watch:
                assert watch.facts == FACTS["azure"]
                server.announce("Preempt", None, "pool_3")
                time.sleep(0.3)
                server.events_enabled.set()
                (sign,) = signs_when(watch, bool)
                assert sign.in_s == 0
        finally:
            server.events_enabled.set()


@pytest.mark.parametrize("broken", [None, [], {"vmSize": "x"}, {"name": ""}])
def test_a_document_without_a_machine_is_no_azure(broken: object) -> None:
    with AzureServer() as server:
        server.compute = broken
        with pytest.raises(MetadataUnavailable, match="describes no machine"):
            AzureMetadata(server.endpoint).facts()


def test_googles_machine_on_demand_and_a_server_that_is_not_googles() -> None:
    with GoogleServer() as server:
        server.values["scheduling/preemptible"] = "FALSE"
        facts = GoogleMetadata(server.endpoint).facts()
        assert facts == replace(FACTS["google"], market="on-demand")
        server.answer_headers = {}
        with pytest.raises(MetadataUnavailable, match="not Google's"):
            GoogleMetadata(server.endpoint).facts()


def test_switches_and_endpoints_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(MetadataUnavailable, match="NO_GCE_CHECK"):
        GoogleMetadata().facts()
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "ftp://x")
    with pytest.raises(ConfigError, match="AZURE_POD_IDENTITY_AUTHORITY_HOST is 'ftp://x'"):
        AzureMetadata()
