"""A grid of images as one file.

Shape suffixes: R rows, N images in each, C channels, H height, W width.
"""

from pathlib import Path

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

SMALL = 96
"""Images smaller than this are enlarged, every pixel becoming a square of whole pixels."""
GAP = 2
"""White pixels between images."""


def grid(images_RNCHW: Float[Tensor, "R N C H W"]) -> Tensor:
    """One image (height, width, channels) in uint8 of images in [0, 1]: row by row, enlarged, with gaps.

    >>> import torch
    >>> grid(torch.zeros(2, 3, 1, 50, 50)).shape
    torch.Size([104, 156, 1])
    """
    scale = max(1, SMALL // images_RNCHW.shape[-1])
    large = images_RNCHW.clamp(0, 1).repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    padded = F.pad(large, (0, GAP, 0, GAP), value=1.0)
    return (255 * padded).round().byte().permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).cpu()


def save_grid(images_RNCHW: Tensor, path: Path) -> None:
    """Writes the grid as a PNG file."""
    from PIL import Image  # matplotlib brings it along

    pixels = grid(images_RNCHW).numpy()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(path)
