"""Pictures of plans and fronts: files that say what they show, and errors that name the remedy."""

import pytest

pytest.importorskip("matplotlib")

from autohet.cli.plans.answers import answer_document
from autohet.cli.plans.picture import MOST_LISTED, draw, front_figure, ink, listed_points
from planner.errors import ConfigError
from planner.strategies import plan_with
from tests.planner.cases import DEMO, fleet, request

FLEET = fleet(*DEMO)


def _document(strategy, **wishes):
    return answer_document(plan_with(strategy, request(FLEET, 16, **wishes)))


def test_a_comparison_names_every_strategy_its_time_and_every_gpu_type(tmp_path):
    results = [_document(name) for name in ("autohet", "megatron")]
    draw({"results": results}, FLEET, tmp_path / "plans.svg")
    text = (tmp_path / "plans.svg").read_text()
    for result in results:
        workers = sum(
            len(stage["workers"]) for p in result["plan"]["pipelines"] for stage in p["stages"]
        )
        assert f"{result['strategy']}: " in text
        assert f"{workers} of 7 GPUs" in text
    assert all(f">{gpu}<" in text for gpu in ("A100", "A10G", "T4"))


def test_one_plan_says_how_many_gpus_of_each_type_it_uses(tmp_path):
    document = _document("megatron")
    draw(document, FLEET, tmp_path / "plan.svg")
    assert ">A100 (2 of 2)<" in (tmp_path / "plan.svg").read_text()


def test_a_front_numbers_its_points_and_lists_them(tmp_path):
    document = _document("fasop", objective="pareto")
    draw(document, FLEET, tmp_path / "front.svg")
    text = (tmp_path / "front.svg").read_text()
    assert "in orange: the cheapest tokens" in text
    assert len(document["front"]) > 1
    for number, member in enumerate(document["front"], 1):
        assert text.count(f">{number}<") >= 2
        assert f">{member['predicted']['usd_per_hour']:.2f}<" in text


def test_png_by_name_and_no_plan_refused(tmp_path):
    draw(_document("megatron"), FLEET, tmp_path / "plan.PNG")
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no plan to draw"):
        draw({"strategy": "hap", "feasible": False, "plan": None}, FLEET, tmp_path / "plan.png")


@pytest.mark.parametrize("count", [1, 2, MOST_LISTED, MOST_LISTED + 1, 97])
def test_numbered_points_include_both_ends(count):
    listed = listed_points(count)
    assert len(listed) == min(count, MOST_LISTED)
    assert (listed[0], listed[-1]) == (0, count - 1)


def test_ink_stands_out():
    assert [ink(colour) for colour in ("#000000", "#0072B2", "#E69F00", "#ffffff")] == [
        "white",
        "white",
        "black",
        "black",
    ]


def test_the_front_promises_between_two_prices_what_the_lower_one_buys():
    from matplotlib.figure import Figure

    front = _document("fasop", objective="pareto")["front"]
    line = front_figure(Figure, front, FLEET).axes[0].lines[0]
    prices = list(line.get_xdata())
    assert prices == sorted(prices, reverse=True)
    assert line.get_drawstyle() == "steps-pre"
