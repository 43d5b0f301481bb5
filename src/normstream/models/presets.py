"""Sizes with names. Parameter counts are those of ``pre`` with the vocabulary given here."""

from typing import Any

from normstream.layers import MoEConfig
from normstream.models.config import DecoderConfig
from normstream.models.dit_presets import DIT_PRESETS
from normstream.models.image_presets import IMAGE_PRESETS
from normstream.names import nearest

PRESETS: dict[str, Any] = {
    "tiny": DecoderConfig(dim=64, n_layers=12, n_heads=4, ffn_dim=192, vocab_size=257, tied=False),
    "10m": DecoderConfig(dim=320, n_layers=8, n_heads=5, ffn_dim=864, vocab_size=257, tied=False),
    "60m": DecoderConfig(dim=512, n_layers=12, n_heads=8, ffn_dim=1376, vocab_size=50_304, tied=True),
    "125m": DecoderConfig(dim=768, n_layers=12, n_heads=12, ffn_dim=2048, vocab_size=50_304, tied=True),
    "400m": DecoderConfig(
        dim=1024, n_layers=17, n_heads=16, ffn_dim=4096, vocab_size=50_304, tied=False, max_seq_len=2048
    ),
    "1.3b": DecoderConfig(
        dim=2048, n_layers=16, n_heads=16, ffn_dim=8192, vocab_size=50_304, tied=False, max_seq_len=2048
    ),
    "moe-tiny": DecoderConfig(
        dim=64, n_layers=6, n_heads=4, vocab_size=257, moe=MoEConfig(n_experts=8, top_k=2, ffn_dim=96, z_loss=1e-3)
    ),
    "15b-a2b": DecoderConfig(
        dim=2048,
        n_layers=24,
        n_heads=16,
        vocab_size=50_304,
        max_seq_len=2048,
        moe=MoEConfig(n_experts=64, top_k=6, ffn_dim=1536, normalized=False, z_loss=1e-3),
    ),
    **IMAGE_PRESETS,
    **DIT_PRESETS,
}
"""Decoders: tiny 0.67 M (CPU, minutes), 10m 10 M, 60m 64 M, 125m 124 M, 400m 388 M, 1.3b 1.28 B parameters. With
experts: moe-tiny 1.02 M, of which 0.36 M are active; 15b-a2b 15.1 B, of which 1.97 B are active, its sizes our choice,
its router and losses as in OLMoE, arXiv 2409.02060."""


def preset(name: str) -> Any:
    """The configuration named ``name``; raises ValueError with the nearest name for an unknown one.

    >>> preset("1.3b").dim
    2048
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]
