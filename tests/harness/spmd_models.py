"""Small real models whose forward is the loss:

MLP, ViT-like, decoder stacks of the library, a top-2 mixture of experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.harness.tiny_models import tiny_config


class Model(nn.Module):
    reduction = "sum"
    """As trainers want it, or "mean"."""


class Mlp(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5)
        )

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), targets, reduction=self.reduction)


class Vit(Model):
    def __init__(self, hidden: int = 12, heads: int = 3, layers: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.position = nn.Parameter(torch.randn(1, 4, hidden) * 0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(4)) for _ in range(layers)
        )
        self.up = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, 7)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for at, projections in enumerate(self.qkv):
            y = self.norms[2 * at](x)
            q, k, v = (
                p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in list(projections)[:3]
            )  # type: ignore[arg-type]
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + projections[3](y)  # type: ignore[index]
            x = x + self.down[at](F.gelu(self.up[at](self.norms[2 * at + 1](x))))
        return F.cross_entropy(
            self.head(self.norms[-1](x).mean(1)), targets, reduction=self.reduction
        )


class Norm(nn.Module):
    """The library's RMSNorm without its cast to single precision, which would hide errors below
    1e-7 in a model of doubles.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Decoder(Model):
    """Blocks of `transformers`, as a tiny config of tests/harness/tiny_models names them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = tiny_config(name)
        config._attn_implementation = "sdpa"
        self.vocabulary = int(config.vocab_size)
        self.model = AutoModelForCausalLM.from_config(config)
        for parent in list(self.model.modules()):
            for child, module in list(parent.named_children()):
                if type(module).__name__.endswith("RMSNorm"):
                    setattr(parent, child, Norm(module.weight, module.variance_epsilon))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=self.reduction)


class Experts(Model):
    """Top-2 gating with a capacity for each group of tokens (Lepikhin et al., "GShard", 2021),
    dispatched by einsums.
    """

    def __init__(self, hidden: int = 8, experts: int = 4, capacity: int = 3) -> None:
        super().__init__()
        self.capacity = capacity
        self.experts = experts
        self.inlet = nn.Linear(5, hidden)
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) * 0.3)
        self.head = nn.Linear(hidden, 6)

    def _gates(self, x: Tensor) -> Tensor:
        """[group, token, expert, place]: by which weight a token goes to a place of an expert."""
        chances = self.gate(x).softmax(-1)
        values, chosen = chances.topk(2, dim=-1)
        picked = F.one_hot(chosen, self.experts).to(x.dtype)
        order = picked.sum(2).cumsum(1) - 1
        place = (picked * order.unsqueeze(2)).sum(-1)
        places = F.one_hot(place.long().clamp(max=self.capacity), self.capacity + 1).to(x.dtype)[
            ..., : self.capacity
        ]
        return torch.einsum("gske,gskc,gsk->gsec", picked, places, values)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.inlet(x)
        combine = self._gates(x)
        dispatch = (combine > 0).to(x.dtype)
        inside = torch.einsum("gsec,gsm->egcm", dispatch, x)
        inside = F.relu(torch.einsum("egcm,emh->egch", inside, self.up))
        inside = torch.einsum("egch,ehm->egcm", inside, self.down)
        x = x + torch.einsum("gsec,egcm->gsm", combine, inside)
        return F.cross_entropy(
            self.head(x).flatten(0, 1), targets.flatten(), reduction=self.reduction
        )


def spmd_case(
    name: str, dtype: torch.dtype = torch.float64, batch: int = 6
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and a global batch of it, the same in every process. Some targets do not count."""
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(3)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    def ids(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator)

    match name:
        case "mlp":
            return Mlp().to(dtype), (numbers(batch, 6), ids(5, batch))
        case "vit":
            return Vit().to(dtype), (numbers(batch, 3, 8, 8), ids(7, batch))
        case "experts":
            return Experts().to(dtype), (numbers(batch, 4, 5), ids(6, batch, 4))
    decoder = Decoder(name)
    targets = ids(decoder.vocabulary, batch, 8)
    targets[0, :5] = -100
    return decoder.to(dtype), (ids(decoder.vocabulary, batch, 8), targets)
