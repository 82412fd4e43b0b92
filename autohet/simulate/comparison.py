"""Comparison of AutoHet with the best honest baseline on the same trace.

It has the ratio, whatever it is, its factors, and the reason why it is no larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.inputs.documents import Document, Json

ENOUGH = 1.1
"""Ratio of tokens below which the comparison gives a reason."""


def compare(ours: Json, baselines: Sequence[Json]) -> Document | None:
    """Compare AutoHet's result with the baselines; None if nothing trained.

    `s3_only` does not count as a baseline, since it ignores notices and no real trainer does.

    tokens_ratio is against the baseline with the most tokens; its factors are `useful_share` (time
    in steps that count) and `tokens_per_useful_s` (tokens per second of that time by the GPUs in
    use). usd_ratio is against the baseline with the cheapest tokens.
    """
    honest = []
    for baseline in baselines:
        if baseline["policy"] != "s3_only" and baseline["tokens"]:
            honest.append(baseline)
    if not honest or not ours["tokens"]:
        return None

    best = max(honest, key=_tokens)
    cheapest = min(honest, key=lambda baseline: float(baseline["usd_per_million_tokens"]))
    by_name = {baseline["policy"]: baseline for baseline in honest}
    ratio_by_baseline = {
        name: ours["tokens"] / baseline["tokens"] for name, baseline in by_name.items()
    }

    found = {
        "simulated": True,
        "best_baseline": best["policy"],
        "tokens_ratio": ours["tokens"] / best["tokens"],
        "factors": {
            "useful_share": ours["useful_share"] / best["useful_share"],
            "tokens_per_useful_s": ours["tokens_per_useful_s"] / best["tokens_per_useful_s"],
        },
        "parts": _parts(ours, by_name),
        "cheapest_baseline": cheapest["policy"],
        "usd_per_million_tokens_ratio": (
            cheapest["usd_per_million_tokens"] / ours["usd_per_million_tokens"]
        ),
        "tokens_ratio_by_baseline": ratio_by_baseline,
        "why": None,
    }
    if found["tokens_ratio"] < ENOUGH:
        found["why"] = _why(ours, best, found["factors"])
    return found


def _tokens(result: Json) -> float:
    return float(result["tokens"])


def _parts(ours: Json, by_name: Mapping[str, Json]) -> dict[str, float]:
    """Return the factors of the ratio by part of AutoHet.

    `recovery`: gain of local recovery over restarts with the same plans. `plans`: gain of AutoHet's
    plans on all GPUs over symmetric grids of one type, both with restarts.
    """
    mixed = by_name.get("checkpoint_restart")
    if mixed is None:
        return {}

    parts = {"recovery": ours["tokens"] / mixed["tokens"]}
    one_type = [baseline for name, baseline in by_name.items() if name.startswith("homogeneous")]
    if one_type:
        parts["plans"] = mixed["tokens"] / max(_tokens(baseline) for baseline in one_type)
    return parts


def _why(ours: Json, best: Json, factors: Mapping[str, float]) -> str:
    their_lost_share = 1 - best["useful_share"]
    our_lost_share = 1 - ours["useful_share"]
    restarts = sum(best["changes_by_cause"].values())
    changes = sum(ours["changes_by_cause"].values())
    return (
        f"{best['policy']} spends {their_lost_share:.1%} of the time outside steps that count"
        f" ({restarts} restarts, {best['steps_lost']} steps lost), AutoHet {our_lost_share:.1%}"
        f" ({changes} changes): that is the most that recovery can"
        f" win, {factors['useful_share']:.3f}x; in that time AutoHet does"
        f" {factors['tokens_per_useful_s']:.3f}x the tokens a second"
    )
