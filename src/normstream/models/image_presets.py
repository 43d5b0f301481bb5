"""Sizes of vision Transformers with names. Parameter counts are those of ``pre``."""

from normstream.models.vit import ViTConfig


def _deit(dim: int, n_heads: int) -> ViTConfig:
    return ViTConfig(
        image_size=224,
        channels=3,
        patch_size=16,
        n_classes=1000,
        dim=dim,
        n_layers=12,
        n_heads=n_heads,
        ffn_dim=4 * dim,
        init_std=0.02,
    )


IMAGE_PRESETS: dict[str, ViTConfig] = {"deit-t": _deit(192, 3), "deit-s": _deit(384, 6), "deit-b": _deit(768, 12)}
"""DeiT's (arXiv 2012.12877, table 1): deit-t 5.7 M, deit-s 22 M, deit-b 86.6 M parameters; with ``distillation`` 5.9 M,
22.4 M and 87.3 M."""
