"""Audit of a device's arithmetic: one block, forward and backward, reduced to a checksum.

Devices of one kind that compute one block with equal weights on equal inputs get the same bits, so
unequal checksums show a device that computes wrongly. The block runs on copies of its weights and
on drawn inputs: no gradient is accumulated, no hook of a parameter runs, and no activation of the
training is read or kept.

The bits depend on more than the arithmetic. So the block runs eagerly, with attention as plain
matrix products, by deterministic kernels, without dropout and recomputation; copies of weights are
aligned alike at every worker; and ranks of a tensor-parallel group compute alone: their partial
sums stand for the group's.
"""

import copy
import hashlib
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autohet.runtime.models.config_keys import is_recurrent
from autohet.runtime.models.layers.dropout import column_keys, hashed_values, row_keys
from autohet.runtime.models.layers.loss_terms import PLAIN
from autohet.runtime.models.layers.tensor_parallel import ReduceGroup
from autohet.runtime.models.stages.sketches import sketch
from autohet.runtime.models.stages.stage import StageModel
from recovery.state.checksum import combined
from recovery.state.device_checksum import view_checksums

MIN_TOKENS = 128
MAX_TOKENS = 512
"""Limits on the tokens of an audit: a few do not show a rare fault, and many cost time."""
CPU_INFO = Path("/proc/cpuinfo")
CPU_FACTS = ("model name", "flags", "Features")
"""Lines of CPU_INFO by which libraries choose their kernels."""
OWN_PACKAGES = {"torch", "transformers", "autohet"}
"""Packages of a block's modules on every machine."""
CPU_SETTINGS = ("MKL_", "ONEDNN_", "DNNL_", "ATEN_")
"""Prefixes of environment variables that change these choices."""


@dataclass(frozen=True)
class BlockResult:
    """Output and gradients of an audited block: their checksum, never 0, and their sketch."""

    checksum: int
    sketch: tuple[float, ...] | None = None


@dataclass(frozen=True)
class OwnSums(ReduceGroup):
    """Stand-in for a tensor-parallel group in which a rank takes its own part for every rank's."""

    rank: int

    def all_reduce(self, tensor: Tensor) -> None:
        pass

    def all_reduce_max(self, tensor: Tensor) -> None:
        pass

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        out.copy_(part.expand_as(out))

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None:
        out.copy_(parts[self.rank])

    def all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        out.copy_(given)


def device_key(stage: StageModel, compute: str, length: int) -> int:
    """Return a 63-bit hash of all that the bits of a stage's audits depend on beside the layer.

    Workers with equal keys get equal bits. The key has the device, versions, threads, format,
    slice and shape. compute: format of products. length: tokens of a row.
    """
    spec = stage.spec
    facts: list[object] = [torch.__version__, transformers.__version__, torch.version.cuda]
    facts += [spec.dtype, compute, length, torch.get_float32_matmul_precision()]
    if spec.device.type == "cuda":
        properties = torch.cuda.get_device_properties(spec.device)
        facts += [properties.name, properties.major, properties.minor]
        facts += [properties.multi_processor_count, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]
    else:
        facts += [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
        facts += _cpu_facts()
    facts += _slice_facts(stage)
    packages = set()
    for module in stage.blocks.modules():
        for code in (type(module), module.forward):
            packages.add(code.__module__.partition(".")[0])
    # Some machines may lack a library whose kernels take the place of torch's.
    facts += sorted(packages - OWN_PACKAGES)
    return _hashed(facts)


def slice_key(stage: StageModel, length: int) -> int:
    """Return a 63-bit hash of the part of a layer that a stage's audits compute, on any device.

    0: results of unlike devices cannot be compared by their values. Their scores may send a token
    to other experts.
    """
    if any(parameter.dim() > 2 for parameter in stage.blocks.parameters()):
        return 0
    return _hashed([length, *_slice_facts(stage)])


def _slice_facts(stage: StageModel) -> list[object]:
    tp = stage.spec.tp
    if tp is None:
        return []
    plan_stage = tp.stage
    return [
        tp.rank,
        plan_stage.tp_degree,
        plan_stage.tp_shares,
        plan_stage.sequence_parallel,
        plan_stage.expert_dispatch,
    ]


def _hashed(facts: Sequence[object]) -> int:
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _cpu_facts() -> list[str]:
    """Return the lines about the first core, and the settings, by which kernels are chosen."""
    found = [
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(CPU_SETTINGS)
    ]
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    for line in text.partition("\n\n")[0].splitlines():
        if line.startswith(CPU_FACTS):
            found.append(line)
    return sorted(found)


def audit_block(
    stage: StageModel, layer: int, seed: int, step: int, length: int, *, sketched: bool = False
) -> BlockResult | None:
    """Return what a layer's output and gradients are on the inputs of `step`.

    The gradients are those of the input and of trained weights. sketched: with their sketch. None:
    the bits of this layer cannot be compared, since its kernels are chosen by time, or memory is
    short.
    """
    spec = stage.spec
    device = spec.device
    if device.type == "cuda" and is_recurrent(spec.config, layer):
        return None
    index = spec.layers.index(layer)
    width = -(-length // spec.sequence_parts)
    num_rows = -(-MIN_TOKENS // length)
    samples = range(step * num_rows, (step + 1) * num_rows)
    columns = torch.arange(int(spec.config.hidden_size), device=device)
    rows = row_keys(seed, samples, width, device)
    inputs = []
    for name in ("input", "gradient"):
        keys = column_keys(f"audit of layer {layer}: {name}", columns)
        inputs.append(hashed_values(rows, keys).to(spec.dtype))
    hidden, gradient = inputs
    try:
        with _SWITCHES, _alone(stage, index), _copied_weights(stage.blocks[index]) as weights:
            out = stage.block_output(index, hidden.requires_grad_(), length)
            learned = [each for each in weights if each.requires_grad]
            found = torch.autograd.grad(out, [hidden, *learned], gradient, allow_unused=True)
        tensors = [out.detach(), *(each for each in found if each is not None)]
        return BlockResult(joint_checksum(tensors), sketch(tensors) if sketched else None)
    except torch.OutOfMemoryError:
        return None


def weights_checksum(stage: StageModel, layer: int) -> int:
    """Return the checksum of the weights that a layer computes with; never 0."""
    block = stage.blocks[stage.spec.layers.index(layer)]
    return joint_checksum(each.detach() for each in block.parameters())


def joint_checksum(tensors: Iterable[Tensor]) -> int:
    """Return one 64-bit checksum of tensors on one device; never 0."""
    return combined(array("Q", [*view_checksums(tensors), 0])) or 1


_SWITCHES = threading.Lock()
"""Held while an audit has set switches of the whole process."""


@contextmanager
def _alone(stage: StageModel, index: int) -> Iterator[None]:
    """Let block `index` compute as the audit wants it; all is put back afterwards."""
    block = stage.blocks[index]
    rows = stage.dropout.rows
    tp = stage.spec.tp
    group = None if tp is None else tp.group
    before = (stage.recompute, stage.loss_terms, stage.inputs, block._compiled_call_impl)
    keys = (rows.keys, rows.own)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        stage.recompute = "none"
        stage.loss_terms = PLAIN
        # Its tables of the training's shape stay.
        stage.inputs = copy.copy(stage.inputs)
        block._compiled_call_impl = None
        rows.keys = rows.own = None
        if tp is not None:
            tp.group = OwnSums(tp.rank)
        # Only warns, since an operator without such a kernel must not end the training.
        torch.use_deterministic_algorithms(True, warn_only=True)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
        stage.recompute, stage.loss_terms, stage.inputs, block._compiled_call_impl = before
        rows.keys, rows.own = keys
        if tp is not None and group is not None:
            tp.group = group


@contextmanager
def _copied_weights(block: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Let a block compute with copies of its weights, which it has back afterwards."""
    places = []
    copies: dict[int, nn.Parameter] = {}
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.append((module, name, parameter))
    try:
        for module, name, parameter in places:
            if id(parameter) not in copies:
                value = parameter.detach().clone(memory_format=torch.contiguous_format)
                copies[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            module._parameters[name] = copies[id(parameter)]
        yield list(copies.values())
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
