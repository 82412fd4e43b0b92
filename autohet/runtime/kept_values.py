"""Values that autograd keeps of one block for its backward pass, by family, in scalars per token.

They are counted on the library's modules (tests/runtime/models/test_kept_values.py counts bytes
alive after a forward pass). With h the hidden size, a = heads * head size, k = key-value heads *
head size, f the inner width, and a fused attention:

| values | none | selective |
|---|---|---|
| a norm: input, normalised input, output | 3 h (RMS norm), 2 h (layer norm) | |
| query, key, value, the attention's output | 2 a + 2 k | 2 a + 2 k |
| Qwen3's norms of query and key: input, normalised input | 2 (a + k) | |
| gate, its SiLU, up, their product | 4 f | 2 f |
| GPT-2's GELU, written out | 5 f | f |
| the block's input, outputs of its two row-parallel products | | 3 h |

In 16 bits an RMS norm keeps 4 h, since it computes in fp32, and Qwen3's norms keep 3 (a + k). One
fp32 number a head (the attention's log-sum-exp) and one or two a norm are added. At the worst
moment of a backward pass, gradients of 2.5 f (GPT-2: 1.5 f) are alive beside the values still kept.
"""

from planner.model_spec import KeptValues

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gpt2"})


def kept_of_block(
    family: str, hidden: int, heads: int, kv_heads: int, head_size: int, inner: int, precision: str
) -> KeptValues | None:
    """Return the kept values of one block; None if the family's modules are not known."""
    if family not in FAMILIES:
        return None
    wide = 1 if precision == "fp32" else 2  # scalars of the compute dtype in one of fp32
    query, key = heads * head_size, kv_heads * head_size
    attention = 2 * query + 2 * key + wide * heads
    selective_split = attention + (1 if family == "gpt2" else 2) * inner
    if family == "gpt2":
        split, norms = attention + 5 * inner, 2 * (2 * hidden + 2)
    else:
        split, norms = attention + 4 * inner, 2 * ((2 + wide) * hidden + wide)
    if family == "qwen3":
        split += (1 + wide) * (query + key) + wide * (heads + kv_heads)
    worst = (1.5 if family == "gpt2" else 2.5) * inner
    normalised = (1 + wide) * key + wide * kv_heads if family == "qwen3" else 0
    return KeptValues(
        split, norms, selective_split, 3 * hidden, worst, 2 * key + normalised, 2 * key
    )


def kept_of_head(family: str, hidden: int, precision: str) -> KeptValues | None:
    """Return the kept values of the final norm and the projection's input.

    Logits are counted apart.
    """
    if family not in FAMILIES:
        return None
    wide = 1 if precision == "fp32" else 2
    norm = 2 * hidden + 2 if family == "gpt2" else (2 + wide) * hidden + wide
    return KeptValues(0, norm, 0, norm)
