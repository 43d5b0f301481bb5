"""Sizes of diffusion Transformers with names, for latents of 32 x 32 x 4 (images of 256 x 256) and 1000 classes.

Parameters are those of the placement ``pre``, as in the official models. Theirs count the fixed table of positions too,
of N D numbers, which is no parameter here.

======== ============ =================== ==================
name     parameters   with the positions  official
======== ============ =================== ==================
dit-s-2  32,865,056   32,963,360          DiT-S/2, 33 M
dit-b-2  130,315,808  130,512,416         DiT-B/2, 130 M
dit-l-4  457,988,224  458,053,760         DiT-L/4, 458 M
======== ============ =================== ==================

Source: Peebles and Xie 2022, arXiv 2212.09748, table 4; facebookresearch/DiT:models.py.

>>> DIT_PRESETS["dit-s-2"].n_patches
256
"""

from typing import Any

from normstream.models.dit import DiTConfig

_LATENTS: dict[str, Any] = {"image_size": 32, "channels": 4, "n_classes": 1000}

DIT_PRESETS: dict[str, DiTConfig] = {
    "dit-s-2": DiTConfig(dim=384, n_layers=12, n_heads=6, patch_size=2, **_LATENTS),
    "dit-b-2": DiTConfig(dim=768, n_layers=12, n_heads=12, patch_size=2, **_LATENTS),
    "dit-l-4": DiTConfig(dim=1024, n_layers=24, n_heads=16, patch_size=4, **_LATENTS),
}
"""Configurations by name; SiameseNorm's paper has DiT-B/2 and DiT-L/4."""
