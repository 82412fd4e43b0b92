"""Low-rank adapters (LoRA, Hu et al. 2021) of a decoder's linear maps.

A map W with an adapter computes W x + s B A x. A is cut as W's input, B as W's output. If W's
output is cut, A is whole on each rank, and its gradient on a rank is a part of the sum. If W's
input is cut, B is whole, and its gradient is a part of the sum. One all-reduce sums both partial
products.

The adapter is stored in the model's config, under `ADAPTER`. Every function of the config
(parameter specs, layouts, checkpoints) therefore sees it.
"""

import difflib
import fnmatch
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autohet.runtime.models.layers.dropout import (
    DropoutRows,
    multiply_dropped,
    without_dropout,
)
from autohet.runtime.models.layers.expert_adapters import LowRank, is_stack, low_rank_updates
from autohet.runtime.models.layers.experts import ROUTERS, ExpertNames
from autohet.runtime.models.layers.recomputation import is_replaying
from autohet.runtime.models.layers.tensor_parallel import (
    RowParallel,
    TensorParallel,
    VocabularyEmbedding,
    leave,
)
from planner.errors import ConfigError

ADAPTER = "autohet_adapter"
"""Attribute of a config: the `Adapter` as a mapping; absent if all weights are trained."""
ALL_LINEAR = "all-linear"
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"
FUSED_RANKS = r".*\.gate_up_proj"
"""peft's pattern for the stacks whose rank is that of gate and up together."""
EXPERT_MAPS = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Names of maps that peft takes for routed experts' in a mixture of experts.

Its `_convert_peft_config_moe` then adapts no other map of such a name, dense or shared.
"""
EMBEDDING_A = ".lora_embedding_A"
EMBEDDING_B = ".lora_embedding_B"
"""Suffixes of an embedding's matrices: A [rank, tokens] and B [hidden size, rank]."""


@dataclass(frozen=True)
class Adapter:
    """A job's `model.adapter`, with the model that it adapts.

    base: a directory or hub id; None: the base is drawn from the seed. text_path: path of the text
    model in a multimodal base; empty: the base is a text model. base_format: that of its
    linear maps (`models.quantized.weight`); None: that of the job's precision.
    """

    kind: str
    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    rslora: bool
    base: str | None = None
    revision: str | None = None
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()
    text_path: str = ""
    base_format: str | None = None

    @property
    def scaling(self) -> float:
        """Factor of the update B A x."""
        if self.rslora:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank

    def scaling_of(self, rank: int) -> float:
        """Return the factor of an update of another rank, whose alpha is in proportion."""
        return self.scaling * math.sqrt(rank / self.rank) if self.rslora else self.scaling

    @property
    def patterns(self) -> tuple[str, ...]:
        """Targets other than `all-linear`."""
        given = tuple(self.targets)
        if isinstance(self.targets, str):
            given = (self.targets,)
        return tuple(each for each in given if each != ALL_LINEAR)

    def matches(self, module_path: str) -> bool:
        """Return True if a linear map of a block is a target."""
        if ALL_LINEAR in self.targets:
            return True
        return any(_matches(pattern, module_path) for pattern in self.patterns)

    def names(self, module_path: str) -> bool:
        """Return True if the embedding or the head is a target: only a name selects it."""
        return any(f".{module_path}".endswith(f".{each}") for each in self.patterns)

    def saves(self, parameter: str) -> bool:
        """Return True if a parameter of the base belongs to a module of `modules_to_save`."""
        return is_saved(parameter, self.modules_to_save)


def is_saved(parameter: str, modules: Collection[str]) -> bool:
    """Return True if a parameter belongs to a module whose path ends in one of these texts.

    As in peft, `norm` selects `input_layernorm` too.
    """
    path = parameter
    while "." in path and modules:
        path, _, _ = path.rpartition(".")
        if path.endswith(tuple(modules)):
            return True
    return False


def _matches(pattern: str, path: str) -> bool:
    is_end = path == pattern or path.endswith(f".{pattern}")
    return is_end or fnmatch.fnmatchcase(path, pattern)


def set_adapter(
    config: PreTrainedConfig,
    section: Any,
    base: str | None,
    revision: str | None,
    text_path: str = "",
) -> None:
    """Put a job's adapter (`AdapterSection`; None: no-op) into the model's config."""
    if section is not None:
        fields = asdict(section)
        del fields["from_"]
        fields |= {"base": base, "base_format": fields["base"]}
        adapter = Adapter(**fields, revision=revision, text_path=text_path)
        setattr(config, ADAPTER, asdict(adapter))


def adapter_of(config: PreTrainedConfig | Mapping[str, Any]) -> Adapter | None:
    """Return the adapter of a model's config or a checkpoint's config mapping; None if none."""
    is_mapping = isinstance(config, Mapping)
    found = config.get(ADAPTER) if is_mapping else getattr(config, ADAPTER, None)
    if found is None:
        return None
    fields = dict(found)
    # JSON has lists for tuples.
    if not isinstance(fields["targets"], str):
        fields["targets"] = tuple(fields["targets"])
    fields["modules_to_save"] = tuple(fields.get("modules_to_save", ()))
    return Adapter(**fields)


def without_any_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config whose stages drop nothing, of the model or its adapter."""
    plain = without_dropout(config)
    found = getattr(plain, ADAPTER, None)
    if found is not None:
        setattr(plain, ADAPTER, {**found, "dropout": 0.0})
    return plain


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def target_ranks(
    adapter: Adapter, model: PreTrainedModel, layers: str, names: ExpertNames | None
) -> dict[str, int]:
    """Return the rank of each weight's update, by the weight's path without `.weight`.

    They are linear maps of the blocks, their routers and stacks of routed experts, then the
    embedding and the head if they are named. layers: path of the model's list of blocks. names: the
    experts' names in files; None: all blocks are dense.

    Raises:
        ConfigError: a target matches nothing, or a block has none.
    """
    prefix = f"{layers}."
    linear: list[str] = []
    ends: list[str] = []
    for path, module in model.named_modules():
        if path.startswith(prefix) and is_linear(module):
            linear.append(path)
        elif module in (model.get_input_embeddings(), model.get_output_embeddings()):
            ends.append(path)
    named = [path for path in ends if adapter.names(path)]
    found = {path: adapter.rank for path in linear if adapter.matches(path)}
    aliases: list[str] = []
    if names is not None:
        of_experts = _ranks_of_experts(adapter, model, prefix, names)
        if adapter.dropout and of_experts:
            raise ConfigError(
                f"model.adapter.dropout is {adapter.dropout}, but routed experts and routers"
                f" ({min(of_experts)}) are adapted without dropout, as in peft; set it to 0, or"
                " name targets without them"
            )
        found |= of_experts
        aliases = [*of_experts, *_expert_maps(of_experts, names)]
    for pattern in adapter.patterns:
        if not any(_matches(pattern, path) for path in [*linear, *named, *aliases]):
            raise ConfigError(_explain_unmatched(pattern, linear))

    for index, _ in model.get_submodule(layers).named_children():
        if any(path.startswith(f"{prefix}{index}.") for path in found):
            continue
        raise ConfigError(
            f"model.adapter.targets match no linear map of block {index}, and a stage of"
            " such blocks alone would have nothing to train; name targets that each block has"
        )
    return found | dict.fromkeys(named, adapter.rank)


def _ranks_of_experts(
    adapter: Adapter, model: nn.Module, prefix: str, names: ExpertNames
) -> dict[str, int]:
    """Return the ranks of adapted routers and stacks by path, as peft chooses them.

    `all-linear` means what was a linear map before transformers stacked experts, routers too.
    """
    found: dict[str, int] = {}
    patterns = replace(adapter, targets=adapter.patterns) if names.are_stacked else adapter
    for path, module in model.named_modules():
        in_block = path.removeprefix(prefix).partition(".")[2]
        if in_block in ROUTERS and not is_linear(module) and patterns.matches(path):
            found[path] = adapter.rank
    for path, _ in model.named_parameters():
        rank = _rank_of_stack(adapter, path, names) if is_stack(path) else 0
        if rank:
            found[path] = rank
    return found


def _rank_of_stack(adapter: Adapter, path: str, names: ExpertNames) -> int:
    """Return the rank of a stack's update; 0: it has none.

    A stack that its maps' names select has the rank of both: `gate_proj` and `up_proj` are one.

    Raises:
        ConfigError: one of its maps alone is named.
    """
    maps = names.maps(path)
    chosen = [each for each in maps if adapter.matches(each)]
    if chosen and len(chosen) == len(maps):
        return adapter.rank * len(maps)
    if any(_matches(pattern, path) for pattern in adapter.patterns):
        return adapter.rank
    if chosen:
        given, other = (_last_component(each) for each in (*chosen, *set(maps) - set(chosen)))
        raise ConfigError(
            f"model.adapter.targets names {given} without {other}, which routed experts hold in one"
            f" stack; name both, or the maps meant by more of their path, such as"
            f" shared_experts.{given}"
        )
    return 0


def _expert_maps(paths: Collection[str], names: ExpertNames) -> list[str]:
    maps: list[str] = []
    for path in paths:
        maps += names.maps(path) if is_stack(path) else ()
    return maps


def module_of(path: str, model: nn.Module) -> nn.Module:
    """Return the module that holds an adapted weight: of a stack, that of its experts."""
    parent, _, _ = path.rpartition(".")
    return model.get_submodule(parent if is_stack(path) else path)


def peft_targets(ranks: Mapping[str, int], model: nn.Module, adapter: Adapter) -> dict[str, Any]:
    """Return the keys of peft's `LoraConfig` that select adapted weights, with whole paths.

    ranks: of `target_ranks`.
    """
    is_mixture = any(is_stack(path) for path, _ in model.named_parameters())
    modules: list[str] = []
    parameters: list[str] = []
    for path in ranks:
        if is_stack(path):
            parameters.append(path)
            continue
        module = model.get_submodule(path)
        is_map = is_linear(module) or isinstance(module, nn.Embedding)
        # peft adapts the weight of a map under this key, whatever the map's name.
        if not is_map or (is_mixture and _last_component(path) in EXPERT_MAPS):
            parameters.append(f"{path}.weight")
        else:
            modules.append(path)
    found: dict[str, Any] = {"target_modules": modules}
    # Older releases of peft do not know the key.
    if parameters:
        found["target_parameters"] = parameters
    wider = {rank for path, rank in ranks.items() if rank != adapter.rank}
    for rank in wider:
        found["rank_pattern"] = {FUSED_RANKS: rank}
        found["alpha_pattern"] = {FUSED_RANKS: whole_number(adapter.alpha * rank / adapter.rank)}
    return found


def whole_number(value: float) -> float:
    """Return a whole number as an integer: peft writes it without a decimal point."""
    return int(value) if value == int(value) else value


def check_ends(adapter: Adapter, targets: Collection[str], model: PreTrainedModel) -> None:
    """Check `modules_to_save`, and that a tied embedding has no adapter.

    targets: paths of the modules that have one.

    Raises:
        ConfigError: a name matches no module, a module with an adapter, or a tied head; or an
        embedding that is tied to the head is a target.
    """
    is_tied = bool(model.config.tie_word_embeddings)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for path in targets:
        if is_tied and not is_stack(path) and model.get_submodule(path) in ends:
            raise ConfigError(
                f"model.adapter.targets: {path} is tied to the other end of the model, so an update"
                " of it alone unties them; name the embedding in model.adapter.modules_to_save"
            )
    for name in adapter.modules_to_save:
        one = replace(adapter, modules_to_save=(name,))
        saved = [each for each, _ in model.named_parameters() if one.saves(each)]
        if not saved:
            raise ConfigError(
                f"model.adapter.modules_to_save: '{name}' is no module of this model with weights"
                " of its own (a tied head has those of the embedding)"
            )
        for path in targets:
            if any(f"{each}.".startswith(f"{path}.") for each in saved):
                raise ConfigError(
                    f"model.adapter.modules_to_save: '{name}' trains {path}, which has an adapter;"
                    " leave one of them out"
                )


def _explain_unmatched(pattern: str, linear: Collection[str]) -> str:
    """Return an error message with the nearest linear map, by path or by its last component."""
    names = sorted({_last_component(path) for path in linear})
    known = [*names, ALL_LINEAR]
    near = difflib.get_close_matches(_last_component(pattern), known, n=1, cutoff=0.0)
    return (
        f"model.adapter.targets: '{pattern}' matches no linear map of the blocks; the nearest is"
        f" {near[0]} (of {', '.join(known)})"
    )


def shortest_targets(paths: Collection[str], model: nn.Module) -> list[str]:
    """Return the last path components if they match the targets alone, else the whole paths.

    peft and inference servers expect the last components.
    """
    ends = {_last_component(path) for path in paths}
    matched = set()
    for path, module in model.named_modules():
        is_map = is_linear(module) or isinstance(module, nn.Embedding)
        if is_map and _last_component(path) in ends:
            matched.add(path)

    if matched == set(paths):
        return sorted(ends)
    return sorted(paths)


def _last_component(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def initial_adapters(
    shapes: Mapping[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole fp32 tensor) of adapters, a function of seed and name alone.

    They are drawn as peft draws them: A uniform, Kaiming with a = sqrt(5), and B zero; of an
    embedding, A zero and B normal.
    """
    for name, shape in shapes.items():
        tensor = torch.zeros(shape)
        if name.endswith((A_SUFFIX, EMBEDDING_B)):
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            # 63 bits, since torch takes a signed number.
            own_seed = int.from_bytes(digest[:8], "little") >> 1
            generator = torch.Generator().manual_seed(own_seed)
            if name.endswith(EMBEDDING_B):
                nn.init.normal_(tensor, generator=generator)
            else:
                # Of a stack, each expert's matrix as if it were alone.
                nn.init.kaiming_uniform_(tensor.flatten(0, -2), a=math.sqrt(5), generator=generator)
        yield name, tensor


def is_adapter(name: str) -> bool:
    """Return True if a parameter's name is that of an adapter's matrix."""
    return name.endswith((A_SUFFIX, B_SUFFIX, EMBEDDING_A, EMBEDDING_B))


@dataclass
class AdapterDropout:
    """Dropout of one map's adapter.

    rows: keys of the stage's present rows, shared by its maps. columns: keys of the columns that
    this rank has of the map's input.
    """

    rate: float
    rows: DropoutRows
    columns: Tensor

    def product(self, x: Tensor, lora_a: nn.Linear) -> Tensor:
        """Return A applied to x, with dropout where the stage trains."""
        if self.rows.keys is None:
            found: Tensor = lora_a(x)
            return found
        return multiply_dropped(x, lora_a.weight, self.rows.keys, self.columns, self.rate)


class AdaptedLinear(nn.Module):
    """Linear map with a low-rank update.

    Holds `weight` (and `bias`) under the names of the module that it replaces: nn.Linear's (out,
    in), Conv1D's (in, out), or a `RowParallel` of either. dropout: drops elements of the update's
    input; None: none.
    """

    def __init__(
        self,
        original: nn.Module,
        rank: int,
        scaling: float,
        dropout: AdapterDropout | None = None,
    ) -> None:
        super().__init__()
        self.tp: TensorParallel | None = None
        self.transposed = isinstance(original, Conv1D)
        if isinstance(original, RowParallel):
            self.tp = original.tp
            self.transposed = original.transposed
        self.scaling = scaling
        self.weight: nn.Parameter = original._parameters["weight"]  # type: ignore[assignment]
        self.bias: nn.Parameter | None = original._parameters.get("bias")
        self.is_on = True
        self.dropout = dropout
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear
        """Product of x and the frozen weight, unless that is transposed."""
        # Of the right shapes once the stage's slices are loaded.
        self.lora_A = nn.Linear(rank, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, rank, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        product = x @ weight if self.transposed else self.product(x, weight)
        if not self.is_on:
            total = leave(product, self.tp)
        elif self.tp is None:
            total = product + self._update(x)
        else:
            update = self._update(x)
            # In the product's memory, which selective recomputation keeps: a replay finds the sum.
            if not is_replaying():
                product.add_(update)
            total = leave(product, self.tp)
        if self.bias is None:
            return total
        return total + self.bias

    def low(self, x: Tensor) -> Tensor:
        """Return A x, with dropout where the stage trains."""
        if self.dropout is not None:
            return self.dropout.product(x, self.lora_A)
        found: Tensor = self.lora_A(x)
        return found

    def _update(self, x: Tensor) -> Tensor:
        """Return s B A x."""
        update: Tensor = self.lora_B(self.low(x)) * self.scaling
        return update


class AdaptedEmbedding(VocabularyEmbedding):
    """Embedding with a low-rank update: E[x] + s (B A)[x], of this rank's rows."""

    def __init__(self, original: nn.Module, rank: int, scaling: float) -> None:
        tp = getattr(original, "tp", None)
        super().__init__(original, tp, getattr(original, "start", 0))
        self.scaling = scaling
        self.is_on = True
        # Of the right shapes once the stage's slices are loaded.
        self.lora_embedding_A = nn.Parameter(torch.empty(rank, rank, device="meta"))
        self.lora_embedding_B = nn.Parameter(torch.empty(rank, rank, device="meta"))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.own_rows(tokens, self.weight)
        if self.is_on:
            low = self.own_rows(tokens, self.lora_embedding_A.T)
            rows = rows + F.linear(low, self.lora_embedding_B) * self.scaling
        return leave(rows, self.tp)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute as its base, without the updates of its adapters."""
    adapted: list[AdaptedLinear | AdaptedEmbedding | LowRank] = [*low_rank_updates(model)]
    for module in model.modules():
        if isinstance(module, AdaptedLinear | AdaptedEmbedding):
            adapted.append(module)
    for each in adapted:
        each.is_on = False
    try:
        yield
    finally:
        for each in adapted:
            each.is_on = True
