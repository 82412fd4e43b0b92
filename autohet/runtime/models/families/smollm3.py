"""SmolLM 3: as Llama, with layers without positions."""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.config_keys import DECODER_KEYS, WINDOW_KEYS

FAMILY = auto_family(
    "smollm3",
    config_keys=DECODER_KEYS
    | WINDOW_KEYS - {"max_window_layers"}
    | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
)
