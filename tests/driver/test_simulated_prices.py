"""Spot prices over time in a simulation: read as EC2 gave them, charged second by second, seen by
whoever decides by price.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from autohet.cli.main import main
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.simulate.costs import Costs
from autohet.simulate.dollars.bill import Bill
from autohet.simulate.dollars.price_file import RecordedPrices, price_sources, read_prices
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.remembered_planning import RememberedPlanning, SearchCache
from autohet.simulate.simulation import Scenario, TraceSimulation, horizon
from autohet.simulate.spot_trace import read_trace
from planner.errors import ConfigError
from planner.inputs.catalogue import PRICES_AS_OF
from planner.inputs.cluster import cluster_from_document
from planner.inputs.fleet import Fleet, Node, NodeType
from tests.driver.test_simulated_planning import planning_of
from tests.driver.test_simulation import CLUSTER, job_document
from tests.harness.local_fleet import cluster_document

KIND = NodeType("small", "A10G", 1, 2**34, 1e9, 1e9, usd_per_hour=1.0, max_nodes=4)
BEGIN = "2026-11-24T05:00:00+00:00"


def entry(instance, zone, at, price, product="Linux/UNIX"):
    """As `aws ec2 describe-spot-price-history --output json` prints one."""
    return {
        "AvailabilityZone": zone,
        "InstanceType": instance,
        "ProductDescription": product,
        "SpotPrice": price,
        "Timestamp": f"2026-11-24T{at}+00:00",
    }


HISTORY = {
    "SpotPriceHistory": [
        entry("g5.2xlarge", "us-east-1a", "07:00:00", "0.600000"),
        entry("g5.2xlarge", "us-east-1a", "04:00:00", "0.480000"),
        entry("g5.2xlarge", "us-east-1a", "05:30:00", "9.000000", "Windows"),
        entry("g5.2xlarge", "us-east-1b", "05:00:00", "7.000000"),
        entry("g6.2xlarge", "us-east-1a", "05:00:00", "0.400000"),
        {"InstanceType": "g6.2xlarge"},
    ]
}


def ec2_cluster(**zones):
    """Spot nodes `g5` and `g6`, and `floor`, a g5.2xlarge on demand."""
    document = cluster_document()
    types = document["available_node_types"]
    for name in ("big", "small", "pair"):
        del types[name]
    for name, instance, spot in (
        ("g5", "g5.2xlarge", True),
        ("g6", "g6.2xlarge", True),
        ("floor", "g5.2xlarge", False),
    ):
        config = {
            "InstanceType": instance,
            **({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}),
        }
        labels = {"autohet.io/zone": zones[name]} if name in zones else {}
        types[name] = {
            "resources": {"CPU": 8, "GPU": 1},
            "labels": labels,
            "node_config": config,
            "max_workers": 4,
        }
    return document


ZONED = ec2_cluster(g5="us-east-1a", g6="us-east-1a", floor="us-east-1a")


def written(tmp_path, document, name="prices.json"):
    path = tmp_path / name
    path.write_text(json.dumps(document))
    return path


def recorded(tmp_path, history=HISTORY, document=ZONED, begin=None):
    return read_prices(written(tmp_path, history), cluster_from_document(document), document, begin)


# the file
# ------------------------------------------------------------------------------


def test_the_shipped_file_takes_what_the_documented_command_prints(tmp_path):
    """The command asks a whole region; the file's nodes come in any of its zones."""
    document = yaml.safe_load(Path("cluster_configs/aws-mixed-spot.yaml").read_text())
    provider = document["provider"]
    zones = sorted(zone.strip() for zone in provider["availability_zone"].split(","))
    other = provider["region"] + "f"
    assert len(zones) > 1
    assert other not in zones
    history = [
        entry("g5.2xlarge", zones[0], "05:00:00", "0.50"),
        entry("g5.2xlarge", zones[1], "06:00:00", "0.40"),
        entry("g5.2xlarge", zones[0], "07:00:00", "0.30"),
        entry("g5.2xlarge", other, "05:30:00", "9.00"),
    ]
    found = recorded(tmp_path, {"SpotPriceHistory": history}, document)
    assert sorted(found.rows) == [(0.0, "g5", 0.5), (3600.0, "g5", 0.4)]
    assert f"{zones[0]}, {zones[1]}" in found.sources["g5"]
    abroad = [entry("g5.2xlarge", "eu-west-1a", "05:00:00", "0.50")]
    with pytest.raises(ConfigError, match=f"in eu-west-1a; node type 'g5' is in {zones[0]}"):
        recorded(tmp_path, {"SpotPriceHistory": abroad}, document)
    del provider["availability_zone"]
    with pytest.raises(ConfigError, match=f"node type 'g5' is in {provider['region']}"):
        recorded(tmp_path, {"SpotPriceHistory": abroad}, document)


def test_a_history_becomes_rows_of_the_nodes_own_instance_type_zone_and_market(tmp_path):
    found = recorded(tmp_path)
    assert sorted(found.rows) == [(-3600.0, "g5", 0.48), (0.0, "g6", 0.4), (7200.0, "g5", 0.6)]
    assert found.sources.keys() == {"g5", "g6"}  # the floor is not on the spot market
    assert BEGIN in found.sources["g5"]
    assert "g5.2xlarge in us-east-1a" in found.sources["g5"]
    pages = [{"SpotPriceHistory": [each]} for each in HISTORY["SpotPriceHistory"]]
    assert recorded(tmp_path, pages).rows == found.rows


def test_the_trace_may_begin_later(tmp_path):
    later = datetime(2026, 11, 24, 6, tzinfo=UTC)
    expected = [(-7200.0, "g5", 0.48), (-3600.0, "g6", 0.4), (3600.0, "g5", 0.6)]
    assert sorted(recorded(tmp_path, begin=later).rows) == expected
    assert sorted(recorded(tmp_path, begin=later.replace(tzinfo=None)).rows) == expected
    prices = PriceHistory({k.name: k for k in cluster_from_document(ZONED).node_types}, expected)
    assert prices.steps("g5", 1e4) == [(0.0, 0.48), (3600.0, 0.6)]
    assert [prices.usd_per_hour("g5", at) for at in (3599.9, 3600.0)] == [0.48, 0.6]


@pytest.mark.parametrize(
    ("history", "document", "begin", "message"),
    [
        ({}, ZONED, None, "no list SpotPriceHistory"),
        ([[]], ZONED, None, "no list SpotPriceHistory"),
        (
            {"SpotPriceHistory": []},
            ZONED,
            None,
            "of none, the cluster's spot nodes of g5.2xlarge, g6.2xlarge",
        ),
        (
            HISTORY,
            ec2_cluster(),
            None,
            "g5.2xlarge in us-east-1a, us-east-1b; node type 'g5' names no zone: set the label",
        ),
        (HISTORY, ec2_cluster(g5="us-east-1f"), None, "node type 'g5' is in us-east-1f"),
        (
            HISTORY,
            ZONED,
            datetime(2026, 11, 24, 4, 30, tzinfo=UTC),
            "--prices-from is .*; prices .* are of 2026-11-24T05:00",
        ),
        (HISTORY, ZONED, datetime(2026, 11, 25), "--prices-from is"),
    ],
)
def test_a_history_that_does_not_fit_is_named(tmp_path, history, document, begin, message):
    with pytest.raises(ConfigError, match=message):
        recorded(tmp_path, history, document, begin)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_what_is_no_json_is_named(tmp_path, text):
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="are no JSON"):
        read_prices(path, CLUSTER, cluster_document())


def test_constant_prices_are_said_to_be_so(tmp_path):
    document = ec2_cluster(g5="us-east-1a", g6="us-east-1a")
    document["available_node_types"]["g6"]["labels"]["autohet.io/usd-per-hour"] = "0.3"
    document["available_node_types"]["other"] = cluster_document()["available_node_types"][
        "small"
    ] | {"max_workers": 1}
    del document["available_node_types"]["other"]["labels"]["autohet.io/usd-per-hour"]
    found = price_sources(cluster_from_document(document), document, RecordedPrices())
    assert found["g5"] == f"constant, the catalogue's price of g5.2xlarge: {PRICES_AS_OF}"
    assert found["g6"] == "constant, the cluster file's label autohet.io/usd-per-hour"
    assert found["other"].startswith("no price is known")
    over_time = price_sources(cluster_from_document(ZONED), ZONED, recorded(tmp_path))
    assert over_time["g5"].startswith("over time")
    assert over_time["floor"].startswith("constant")


def test_the_catalogue_says_what_its_prices_are_of():
    header = (Path(planner.__file__).parent / "data" / "ec2_gpu_instances.csv").read_text()
    line = next(line for line in header.splitlines() if "usd_per_hour (" in line)
    date = PRICES_AS_OF.rpartition(" ")[2]
    assert f"({PRICES_AS_OF.rpartition(',')[0]})" in line
    assert f"generated at {date}" in header


# the bill
# ------------------------------------------------------------------------------

seconds = st.integers(0, 3000)
cents = st.integers(0, 500)


@settings(max_examples=200, derandomize=True)
@given(st.dictionaries(st.integers(-500, 3000), cents), seconds, seconds)
def test_a_machine_is_charged_each_second_at_the_price_of_then(rows, begin, end):
    """Against a sum over seconds, which knows nothing of intervals."""
    begin, end = sorted((begin, end))
    price, total = 100, 0
    for second in range(-500, end):
        price = rows.get(second, price)
        total += price if second >= begin else 0
    bill = Bill(
        PriceHistory(
            {"small": KIND}, [(float(at), "small", value / 100) for at, value in rows.items()]
        )
    )
    bill.machines["small-0"] = (KIND, float(begin))
    bill.pay("small-0", float(end))
    bill.pay("small-0", 1e9)
    assert bill.usd == pytest.approx(total / 100 / 3600, abs=1e-9)


TRACE = "time_s,node_type,num_nodes\n0,small,1\n4000,small,2\n"
ROWS = [(0.0, "small", 1.0), (3000.0, "small", 4.0), (6000.0, "small", 0.5)]


def simulation_of(tmp_path, rows=ROWS, text=TRACE, hours=2.0, cluster=CLUSTER, **parallelism):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    trace, job = read_trace(path, cluster, 120.0), Job.from_document(job_document(**parallelism))
    return TraceSimulation(
        Scenario(job, cluster, trace, horizon(trace, hours), prices=RecordedPrices(rows))
    )


@pytest.mark.thorough
def test_the_dollars_of_a_run_are_the_hand_computed_ones(tmp_path):
    # small-0 from 0, small-1 from 4000, both until 7200
    first = 3000 * 1.0 + 3000 * 4.0 + 1200 * 0.5
    second = 2000 * 4.0 + 1200 * 0.5
    simulation = simulation_of(tmp_path)
    for policy in ("local_first", "checkpoint_restart", "homogeneous_elastic"):
        found = simulation.run(policy)
        assert found["usd"] == pytest.approx((first + second) / 3600), policy
        assert found["usd_per_million_tokens"] == pytest.approx(
            found["usd"] / found["tokens"] * 1e6
        )
    fixed = simulation.run("homogeneous_fixed")
    assert fixed["usd"] == pytest.approx({1: first, 2: first + second}[fixed["nodes"]] / 3600)


# who decides by price
# ------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["local_first", "checkpoint_restart"])
def test_a_bound_on_the_price_is_held_at_the_price_of_then(tmp_path, policy):
    """Two nodes for at most $3 an hour: not at $4 each, nor at $2 each; at 50 cents."""

    def used(rows, text=TRACE):
        run = simulation_of(tmp_path, rows, text, max_usd_per_hour=3.0).run(policy)
        return [stretch["num_gpus"] for stretch in run["stretches"]]

    assert used([]) == [1, 2]
    assert used([(3000.0, "small", 2.0)]) == [1]
    # both may be had when it becomes cheaper; a trainer that does not watch prices notices with the
    # next arrival
    cheaper = [(3000.0, "small", 2.0), (5000.0, "small", 0.5)]
    expected = [1, 2, 3] if policy == "local_first" else [1, 3]
    assert used(cheaper, TRACE + "5500,small,3\n") == expected


@pytest.mark.thorough
def test_a_job_that_waits_for_a_lower_price_begins_when_it_comes(tmp_path):
    rows = [(0.0, "small", 2.0), (900.0, "small", 0.5)]
    run = simulation_of(tmp_path, rows, hours=0.5, max_usd_per_hour=1.0).run("local_first")
    # the node is requested when its price is known, and boots then
    assert 900.0 < run["stretches"][0]["begin_s"] < 1100.0
    assert run["usd"] == pytest.approx((1800.0 - 900.0) * 0.5 / 3600, rel=0.05)
    assert any("for at most 1.00 $/h" in reason for reason in run["decisions"])


@pytest.mark.thorough
def test_the_constant_price_is_nobodys_where_another_is_recorded(tmp_path):
    """$10 a node in the cluster file, $1 on the market: two nodes for at most $3 an hour, whoever
    trains on them.
    """
    dear = replace(
        CLUSTER, node_types=tuple(replace(kind, usd_per_hour=10.0) for kind in CLUSTER.node_types)
    )
    rows, two = [(0.0, "small", 1.0)], "time_s,node_type,num_nodes\n0,small,2\n"
    simulation = simulation_of(tmp_path, rows, two, hours=0.5, cluster=dear, max_usd_per_hour=3.0)
    for policy in ("local_first", "checkpoint_restart", "homogeneous_elastic", "homogeneous_fixed"):
        assert max(stretch["num_gpus"] for stretch in simulation.run(policy)["stretches"]) == 2, (
            policy
        )


def at_price(usd, *names):
    return Fleet(0, tuple(Node(name, replace(KIND, usd_per_hour=usd)) for name in names))


def test_the_price_of_then_changes_no_answer_of_a_job_that_does_not_decide_by_it():
    memory = SearchCache()
    planning = planning_of(memory)
    first = planning.answer(at_price(1.0, "small-0", "small-1"), None)
    later = planning.answer(at_price(9.0, "small-0", "small-1"), first.plan)
    again = planning.answer(at_price(5.0, "small-0", "small-1"), None)
    assert memory.num_searches == 1
    assert later.plan == again.plan == first.plan
    assert [proposal.cost.fleet.usd_per_hour() for proposal in (first, later, again)] == [
        2.0,
        18.0,
        10.0,
    ]


def wishing(**wishes):
    job = Job.from_document(job_document(**wishes))
    return RememberedPlanning(planning_inputs(job), SearchCache(), Costs())


def test_a_job_for_the_cheapest_tokens_takes_the_type_that_is_cheap_then():
    planning = wishing(objective="cost")
    kinds = {kind.name: kind for kind in CLUSTER.node_types}
    for cheap, dear in (("big", "small"), ("small", "big"), ("big", "small")):
        prices = {cheap: 0.1, dear: 10.0}
        fleet = Fleet(
            0,
            tuple(Node(f"{n}-0", replace(kinds[n], usd_per_hour=usd)) for n, usd in prices.items()),
        )
        before = planning.answer(replace(fleet, nodes=fleet.nodes[1:]), None)
        planning.answer(
            fleet, before.plan
        )  # a replan looks at time alone: its plan is not the answer to the next question
        assert planning.answer(fleet, None).plan.workers == (f"{cheap}-0/0",)


def test_a_job_with_a_bound_is_answered_anew_at_another_price():
    planning = wishing(max_usd_per_hour=3.0)
    first = planning.answer(at_price(1.0, "small-0", "small-1"), None)
    assert len(first.plan.workers) == 2
    dearer = planning.answer(at_price(2.0, "small-0", "small-1"), first.plan)
    assert len(dearer.plan.workers) == 1
    assert planning.answer(at_price(1.0, "small-0", "small-1"), None).plan == first.plan


# the command
# ------------------------------------------------------------------------------


def arguments_of(tmp_path):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(ZONED))
    (tmp_path / "trace.csv").write_text("time_s,node_type,num_nodes\n0,g5,2\n0,floor,1\n")
    document = job_document()
    document["emulation"]["relative_speed_by_gpu_type"] = {"A10G": 1.0, "L4": 0.8}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    files = [
        f"--{name}={tmp_path}/{name}.{ext}"
        for name, ext in (("cluster", "yaml"), ("job", "yaml"), ("trace", "csv"))
    ]
    return ["simulate", *files, "--hours", "3", "--policies", "local_first", "--baselines", "none"]


@pytest.mark.thorough
def test_the_command_says_where_prices_are_from_and_draws_them(tmp_path, capsys):
    arguments, history = arguments_of(tmp_path), str(written(tmp_path, HISTORY))
    picture = tmp_path / "run.svg"
    assert main([*arguments, "--prices", history, "--json", "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prices"]["g5"]["usd_per_hour"] == [[0.0, 0.48], [7200.0, 0.6]]
    assert found["results"][0]["usd"] == pytest.approx(2 * (2 * 0.48 + 0.6) + 3 * 1.212)
    assert "USD a GPU-hour" in picture.read_text()
    assert "g5 price" in picture.read_text()
    assert main([*arguments, "--prices", history]) == 0
    told = capsys.readouterr().out
    assert "price of g5: 0.48 to 0.6 $/h, over time, EC2's spot price history of g5.2xlarge" in told
    assert (
        "price of floor: 1.212 $/h, constant, the catalogue's price of g5.2xlarge: on demand"
        in told
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prices-from", BEGIN], "--prices-from needs --prices"),
        (["--prices", "nowhere.json"], "cannot read prices 'nowhere.json'"),
        (["--prices-from", "yesterday", "--prices", "HISTORY"], "--prices-from is 'yesterday'"),
        (["--prices-from", BEGIN, "--prices", "CSV"], "leave out --prices-from"),
    ],
)
def test_wrong_options_are_named(tmp_path, capsys, more, message):
    (tmp_path / "prices.csv").write_text("time_s,node_type,usd_per_hour\n")
    files = {"HISTORY": str(written(tmp_path, HISTORY)), "CSV": str(tmp_path / "prices.csv")}
    assert main([*arguments_of(tmp_path), *(files.get(each, each) for each in more)]) == 2
    assert message in capsys.readouterr().err
