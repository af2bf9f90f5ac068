"""How large the workload is, and the seed that all variants share."""

import os
import random
from dataclasses import dataclass

import numpy as np
import torch

COMMON_SEED = 314


@dataclass(frozen=True)
class Preset:
    """A size of the workload. `config` holds arguments of transformers' LlamaConfig."""

    name: str
    title: str
    dtype: str  # of the parameters
    batch_size: int  # per rank
    bucket_cap_mb: float  # the post's 25 MiB, or as small a part of a small model
    hub: bool  # whether to look for the pretrained model and MRPC
    config: dict


def _llama(hidden, layers, heads, kv_heads, intermediate, vocab, positions) -> dict:
    return dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=positions,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        pad_token_id=2,
        num_labels=2,
        attention_dropout=0.0,
    )


_TINY = _llama(128, 4, 4, 2, 352, 1024, 512)
_SMALL = _llama(512, 4, 8, 4, 1408, 1024, 512)
_SMOL = _llama(960, 32, 15, 5, 2560, 49_152, 8192)
PRESETS = {
    "tiny": Preset("tiny", "tiny Llama", "float32", 8, 0.5, False, _TINY),
    "small": Preset("small", "small Llama", "float32", 32, 2, False, _SMALL),
    "smollm2-360m": Preset("smollm2-360m", "SmolLM2-360M", "bfloat16", 16, 25, True, _SMOL),
}


def get_preset(preset: str | Preset | None = None) -> Preset:
    """A preset by name; None: $ZERO1_PRESET, else `smollm2-360m` with CUDA and `small` without."""
    if isinstance(preset, Preset):
        return preset
    default = "smollm2-360m" if torch.cuda.is_available() else "small"
    name = preset or os.environ.get("ZERO1_PRESET") or default
    if name not in PRESETS:
        origin = "" if preset else " in $ZERO1_PRESET"
        raise ValueError(f"unknown preset {name!r}{origin}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def set_seed(seed: int = COMMON_SEED) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
