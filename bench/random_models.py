"""Shapes of models that benches fill with random weights: nothing is downloaded."""

from __future__ import annotations

from exo_train.models.spec import ModelSpec

# layers, hidden, intermediate, heads, key-value heads, vocabulary
SHAPES = {
    "smol135": (30, 576, 1536, 9, 3, 49152),  # SmolLM2-135M
    "tiny256": (12, 256, 704, 4, 2, 8192),
    "tiny384": (8, 384, 1024, 6, 3, 16384),
    "wide768": (6, 768, 2048, 12, 4, 32768),
}


def random_spec(shape: str) -> ModelSpec:
    """Give the Llama of that name; its numbers are in SHAPES."""
    layers, hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[shape]
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    return ModelSpec.from_config(config, place="the bench's model")
