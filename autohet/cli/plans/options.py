"""Options of `autohet plan`, and the check of output files that all commands share."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from planner.cost.parameters import FRAMEWORKS
from planner.errors import ConfigError
from planner.inputs.documents import parse_number


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options, in the order of its help."""
    _add_inputs(parser)
    _add_modes(parser)
    _add_cost_model(parser)
    _add_wishes(parser)
    _add_outputs(parser)


def check_output(option: str, path: str | None, endings: Sequence[str] = ()) -> None:
    """Raise ConfigError if an option's file cannot be written or has none of `endings`.

    A path of None passes.
    """
    if path is None:
        return
    if endings and Path(path).suffix.lower() not in endings:
        raise ConfigError(f"{option} is '{path}'; its name must end in {' or '.join(endings)}")
    if Path(path).is_dir():
        raise ConfigError(f"{option} is '{path}', a directory; name a file")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(
            f"{option} is '{path}', but there is no directory '{Path(path).parent}'; make it first"
        )


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--job", required=True, metavar="JOB", help="job document (YAML)")
    add("--cluster", required=True, metavar="CLUSTER", help="Ray cluster-launcher YAML")
    add(
        "--profile",
        metavar="TABLE",
        help="measured layer times (CSV or Parquet); default: the bundled measurements",
    )
    add(
        "--links",
        metavar="TABLE",
        help="measured bandwidths (CSV or Parquet); default: labels and catalogue",
    )


def _add_modes(parser: argparse.ArgumentParser) -> None:
    """Add the options of which one says what is done: one search, several, or none."""
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--strategy",
        metavar="NAME",
        help=(
            "the search: autohet, metis, fasop, hap, megatron, varuna, exhaustive (default: the"
            " job's, else autohet)"
        ),
    )
    mode.add_argument(
        "--compare",
        type=_names,
        metavar="A,B,...",
        help="several searches, costed by the same model",
    )
    mode.add_argument(
        "--evaluate", nargs="+", metavar="PLAN", help="cost these plans, search nothing"
    )


def _add_cost_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--calibrate",
        metavar="RUNS",
        help="CSV of measured steps (plan, measured_s) that refine the cost model first",
    )
    add(
        "--framework",
        choices=tuple(FRAMEWORKS),
        help=(
            "whose runs to predict (default: this project's runtime; to --evaluate plans of a job"
            " without data: deepspeed, or where every pipeline is one GPU fsdp or pytorch)"
        ),
    )


def _add_wishes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--objective", choices=("time", "cost", "pareto"), help="default: the job's, else time")
    add(
        "--max-usd-per-hour",
        type=_positive,
        metavar="X",
        help="bound on the price of the nodes in use",
    )
    add(
        "--time-limit",
        type=_positive,
        metavar="S",
        help=(
            "seconds after which any search ends with its best plan so far, and says what it has"
            " not looked at; a draft in progress is finished, which takes seconds for thousands of"
            " GPUs (default: none; searches have budgets of counts)"
        ),
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="PLAN", help="write the plan (JSON)")
    add(
        "--trace-out",
        metavar="FILE",
        help="write the simulated step as a Chrome trace, for Perfetto",
    )
    add("--picture", metavar="FILE", help="draw the plan, or the Pareto front (PNG or SVG)")
    add(
        "--explain",
        action="store_true",
        help=(
            "say why each GPU type is where it is, and what one node more of each would earn (two"
            " further searches a type); of an SPMD program, how every tensor lies over the GPUs"
        ),
    )


def _positive(text: str) -> float:
    value = parse_number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, not '{text}'")
    return value


def _names(text: str) -> list[str]:
    """Split names at commas; spaces around them do not matter."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"must be names between commas such as autohet,megatron, not '{text}'"
        )
    return names
