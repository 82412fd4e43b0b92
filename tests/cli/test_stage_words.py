"""What a person sees of a stage without colour: GPUs, TP degree, and what it does for memory."""

from rich.console import Console

from autohet.cli.plans.display import group_pipelines, segment_label, show, stage_lines
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.plan import Pipeline, Plan, Stage

A100 = NodeType("a100", "A100-80", 4, 80 << 30, 3e11, 5e10)
FLEET = Fleet(1, (Node("a100-0", A100),))
STAGES = (
    Stage(0, 2, ("a100-0/0", "a100-0/1"), recompute="full", shard_optimizer=True),
    Stage(2, 1, ("a100-0/2",)),
    Stage(3, 1, ("a100-0/3",)),
)
IN_FP16 = Stage(3, 1, ("a100-0/3",), compute="fp16")
PIPELINE = Pipeline(STAGES, 4, 1)


def test_stages_say_what_they_do_for_memory() -> None:
    assert stage_lines(PIPELINE, FLEET) == [
        "2 blocks on A100-80, TP 2, full recomputation, optimizer state shared out",
        "2 x 1 block on A100-80",
    ]
    assert [segment_label(stage) for stage in STAGES] == ["2 tp2 Rz", "1", "1"]


def test_stages_say_their_format_where_it_is_not_the_jobs() -> None:
    """Wrong: stages that differ by their format alone are counted together."""
    mixed = Pipeline((*STAGES[:2], IN_FP16), 4, 1)
    assert stage_lines(mixed, FLEET)[1:] == [
        "1 block on A100-80",
        "1 block on A100-80, computes in fp16",
    ]
    assert segment_label(IN_FP16) == "1 fp16"
    plan = Plan("tiny", 8, 1, 128, (PIPELINE, mixed))
    assert [count for count, _ in group_pipelines(plan, FLEET)] == [1, 1]


def test_eighty_columns_without_colour_have_it_all() -> None:
    """Wrong: recomputation and shared state are in the JSON alone, GPU types in colours alone."""
    plan = Plan("tiny", 4, 1, 128, (PIPELINE,))
    predicted = {"step_time_s": 1.0, "tokens_per_s": 1.0, "usd_per_hour": None, "breakdown_s": {}}
    rates = {"A100-80": {"precision": "bf16", "basis": "measured", "source": "blocks"}}
    document = {"strategy": "autohet", "feasible": True, "plan": plan.to_document()}
    console = Console(width=80, no_color=True, record=True, quiet=False)
    show(document | {"predicted": predicted, "rates": rates}, FLEET, console)
    said = console.export_text()
    for words in ("TP 2", "full recomputation", "optimizer state shared out", "A100-80, bf16"):
        assert words in said
