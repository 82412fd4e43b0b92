"""Predicted steps of mixtures of experts beside published ones: results/planner_experts.json.

    python -m scripts.benchmarks.planner.planner_experts

Nothing is fitted here. The published runs use expert parallelism by all-to-all, which this
project's runtime has not. Each GPU is therefore predicted as one that holds its part of the experts
and computes the tokens of its group's GPUs that are routed to them, and the all-to-alls are added,
at the nominal bandwidth of NVLink times `efficiency_intra`. Loads are taken to be equal, as such
benchmarks force them to be. The prediction that counts is that of the framework as it is in
`planner.cost.parameters`; one with fused element-wise kernels, as TransformerEngine has, stands
beside it and explains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autohet.runtime.models.specs.model_spec import model_spec_from_config
from planner.cost.basis import Workload
from planner.cost.model import CostModel
from planner.cost.parameters import CostParameters, framework_parameters
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.model_spec import LayerSpec, ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "planner_experts.json"
LIMIT = 0.15
GIB = 2**30
H100 = NodeType("h100", "H100-80", 8, 80 * GIB, 450e9, 400e9, 1.0)
"""DGX H100: NVLink of 450 GB/s in one direction for each GPU, eight NICs of 400 Gbit/s."""
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
}
AUTOMODEL = (
    "NVIDIA-NeMo/Automodel docs/performance-summary.md, table Pre-Training Performance, DGX-H100,"
    " BF16 (docs.nvidia.com/nemo/automodel/nightly/performance-summary.html)"
)


@dataclass(frozen=True)
class Run:
    """Published run of 4,096 tokens a sequence in bf16 on H100s.

    ep: GPUs over which experts are divided. interleaved: model chunks of a GPU (virtual stages).
    sends_once: a token is sent once to a GPU with several of its experts (DeepEP). step_s,
    tflops_per_gpu: what is published, seconds of a step or model FLOPs a second. parameters: of
    the published model. note: why the prediction is off, where it is.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    parameters: int
    framework: str
    gpus: int
    batch: int
    microbatch: int
    ep: int = 1
    stages: int = 1
    interleaved: int = 1
    sends_once: bool = False
    step_s: float | None = None
    tflops_per_gpu: float | None = None
    length: int = 4096
    note: str = ""


RUNS = (
    Run(
        "Qwen3-30B-A3B, NeMo AutoModel",
        f"{AUTOMODEL}: 21.773 s, 12,040 tokens/s/GPU, 277 TFLOP/s/GPU",
        QWEN3_30B_A3B,
        30_532_122_624,
        "fsdp",
        8,
        512,
        4,
        ep=8,
        sends_once=True,
        step_s=21.773,
    ),
    Run(
        "gpt-oss-20b, NeMo AutoModel",
        f"{AUTOMODEL}: 10.04 s, 13,058 tokens/s/GPU; without expert parallelism",
        GPT_OSS_20B,
        20_914_757_184,
        "fsdp",
        8,
        256,
        2,
        step_s=10.04,
        note="half of its blocks have windows of 128 tokens; the cost model prices chunks of"
        " queries, whose scores are made again in the backward pass, FlexAttention keeps none",
    ),
    Run(
        "Mixtral-8x7B, Megatron Core 0.9",
        "NVIDIA/Megatron-LM megatron/core/transformer/moe/README.md (022bcb5a): 468 TFLOP/s/GPU"
        " in bf16; mapping of its table Reference Best Parallel Mapping",
        MIXTRAL_8X7B,
        46_702_792_704,
        "megatron",
        64,
        256,
        1,
        ep=8,
        stages=4,
        interleaved=8,
        tflops_per_gpu=468.0,
        note="element-wise traffic is counted as in eager PyTorch; TransformerEngine fuses it, and"
        " with fused kernels the prediction is as far below",
    ),
)


def with_expert_parallelism(spec: ModelSpec, ep: int) -> ModelSpec:
    """The spec as one of `ep` GPUs has it: its experts get the tokens of all of these GPUs."""

    def part(block: LayerSpec) -> LayerSpec:
        experts = block.experts
        assert experts is not None
        assert experts.number % ep == 0
        own = replace(experts, number=experts.number // ep, parameters=experts.parameters // ep)
        left = block.parameters - experts.parameters + own.parameters
        # Their attention is fused, also that with sinks.
        return replace(block, parameters=left, experts=own, explicit_scores=None)

    return replace(spec, blocks=tuple(part(block) for block in spec.blocks))


def plan_of(run: Run, spec: ModelSpec) -> Plan:
    """Pipelines with a GPU in each stage; the eight GPUs of a node are eight pipelines."""
    num_pipelines = run.gpus // run.stages
    layers = spec.num_layers // run.stages
    pipelines = []
    for index in range(num_pipelines):
        group, gpu = divmod(index, 8)
        stages = [
            Stage(
                number * layers,
                layers,
                (f"h100-{group * run.stages + number}/{gpu}",),
                recompute="none",
                shard_optimizer=True,
            )
            for number in range(run.stages)
        ]
        count = run.batch // num_pipelines // run.microbatch
        pipelines.append(Pipeline(tuple(stages), count, run.microbatch))
    return Plan(run.name, run.batch, run.microbatch, run.length, tuple(pipelines))


def all_to_all_s(run: Run, spec: ModelSpec, parameters: CostParameters) -> float:
    """Seconds of a step's dispatches and combines, in forward and backward passes."""
    experts = spec.blocks[0].experts
    assert experts is not None
    copies = float(experts.per_token)
    if run.sends_once:
        copies = run.ep * (1.0 - (1.0 - 1.0 / run.ep) ** experts.per_token)
    tokens = run.batch * run.length * run.stages / run.gpus
    sent_bytes = tokens * copies * (run.ep - 1) / run.ep * spec.hidden_size * 2
    rate = H100.intra_node_bytes_per_s * parameters.efficiency_intra
    return 4.0 * sent_bytes / rate * spec.num_layers / run.stages


def parts_s(run: Run, spec: ModelSpec, parameters: CostParameters) -> dict[str, float]:
    """Predicted seconds of a step by part.

    Interleaved stages have (stages - 1) / chunks microbatches of bubble (Narayanan et al. 2021,
    section 2.2).
    """
    fleet = Fleet(0, tuple(Node(f"h100-{index}", H100) for index in range(run.gpus // 8)))
    own = with_expert_parallelism(spec, run.ep)
    cost = CostModel(fleet, Workload(own, run.length, "bf16"), parameters=parameters)
    parts = dict(cost.predict(plan_of(run, spec)).breakdown_s)
    count = run.batch // (run.gpus // run.stages) // run.microbatch
    bubble = (run.stages - 1) / run.interleaved
    parts["pipeline"] *= (count + bubble) / (count + run.stages - 1)
    parts["all_to_all"] = all_to_all_s(run, spec, parameters)
    return parts


def predicted(run: Run) -> dict[str, Any]:
    spec = model_spec_from_config(run.name, run.config, precision="bf16")
    parameters = framework_parameters(run.framework, CostParameters())
    parts = parts_s(run, spec, parameters)
    fused = parts_s(run, spec, replace(parameters, fuses_elementwise=True))
    flops = spec.training_flops(run.length) * run.batch
    measured_s = run.step_s
    if run.tflops_per_gpu is not None:
        measured_s = flops / (run.tflops_per_gpu * 1e12 * run.gpus)
    assert measured_s is not None
    predicted_s = sum(parts.values())
    error = predicted_s / measured_s - 1.0
    return {
        "on": run.name,
        "source": run.source,
        "fitted": "nothing",
        "note": run.note,
        "framework": run.framework,
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "error": error,
        "limit": LIMIT,
        "reached": abs(error) <= LIMIT,
        "parts_s": parts,
        "predicted_with_fused_kernels_s": sum(fused.values()),
        "predicted_tflops_per_gpu": flops / predicted_s / run.gpus / 1e12,
        "parameters": spec.parameters,
        "published_parameters": run.parameters,
    }


def main() -> None:
    rows = [predicted(run) for run in RUNS]
    RESULTS.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['on']}: measured {row['measured_s']:.3f} s, predicted"
            f" {row['predicted_s']:.3f} s ({row['error']:+.1%}), parameters"
            f" {row['parameters'] / row['published_parameters'] - 1:+.2%}; with fused kernels"
            f" {row['predicted_with_fused_kernels_s']:.3f} s"
        )
        print("   ", {name: round(seconds, 3) for name, seconds in row["parts_s"].items()})


if __name__ == "__main__":
    main()
