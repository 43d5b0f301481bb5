"""RandAugment: operations drawn anew for each image, all of one strength (Cubuk et al. 2019, arXiv 1909.13719).

The list is the paper's, the strengths those of torchvision's ``RandAugment``, with m = magnitude / 10:

=================================== ==================================================================
identity, autocontrast, equalize    have no strength
rotate                              by 30 m degrees, to either side
shear_x, shear_y                    by 0.3 m, to either side
translate_x, translate_y            by 150/331 m of the side, to either side
brightness, color, contrast,        blended with black, its grey image, its mean grey, or a smoothed
sharpness                           image: (1 - f) other + f image with f = 1 +- 0.9 m
posterize                           8 - round(4 m) bits are left
solarize                            levels from 256 (1 - m) on are inverted
=================================== ==================================================================

Operations work on the 256 levels of 8-bit images, point operations exactly as pillow's, but on tensors, so that images
stay on their device. What comes in from outside the image is black.

Shape suffixes: B images, C channels, H height, W width.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Levels = Float[Tensor, "B C H W"]
"""Images of whole numbers from 0 to 255, in floating point."""


def rand_augment(images_BCHW: Float[Tensor, "B C H W"], n_ops: int, magnitude: float) -> Float[Tensor, "B C H W"]:
    """``n_ops`` operations of the list above on each image, one after another, drawn from torch's generators.

    Args:
        images_BCHW: in [0, 1]; they are rounded to 256 levels.
        n_ops: how many; 0 changes nothing.
        magnitude: from 0 to 10.

    >>> images = torch.rand(2, 3, 8, 8)
    >>> torch.equal(rand_augment(images, n_ops=0, magnitude=9), images)
    True
    """
    if n_ops == 0:
        return images_BCHW
    names, levels, batch = list(OPERATIONS), (images_BCHW * 255).round(), len(images_BCHW)
    for _ in range(n_ops):
        chosen_B, signs_B = torch.randint(len(names), (batch,)), 2.0 * torch.randint(2, (batch,)) - 1
        results = levels.clone()
        for number in chosen_B.unique().tolist():
            rows = torch.nonzero(chosen_B == number).flatten()
            strength_B = (signs_B[rows] * magnitude / 10).to(levels)
            rows = rows.to(levels.device)
            results[rows] = OPERATIONS[names[number]](levels[rows], strength_B)
        levels = results
    return levels / 255


def identity(levels: Levels, strength_B: Tensor) -> Levels:
    """The images themselves."""
    return levels


def autocontrast(levels: Levels, strength_B: Tensor) -> Levels:
    """Each channel stretched so that its darkest pixel is 0 and its brightest 255; flat channels stay."""
    low, high = levels.amin((-2, -1), keepdim=True), levels.amax((-2, -1), keepdim=True)
    spread = high - low
    return torch.where(spread > 0, ((levels - low) * 255 / spread.where(spread > 0, 1.0)).floor(), levels)


def equalize(levels: Levels, strength_B: Tensor) -> Levels:
    """Each channel with its histogram made flat, by pillow's rule."""
    flat = levels.long().flatten(0, 1).flatten(1)
    counts = torch.zeros(len(flat), 256, dtype=torch.int64, device=levels.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    brightest = flat.amax(1, keepdim=True)
    step = (flat.shape[1] - counts.gather(1, brightest)) // 255
    before = counts.cumsum(1) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(0, 255)
    equalized = torch.where(step > 0, table.gather(1, flat), flat)
    return equalized.to(levels.dtype).view_as(levels)


def posterize(levels: Levels, strength_B: Tensor) -> Levels:
    """The highest bits of each pixel."""
    step = 2.0 ** _each((4 * strength_B.abs()).round())
    return (levels / step).floor() * step


def solarize(levels: Levels, strength_B: Tensor) -> Levels:
    """Bright pixels inverted; none is at strength 0."""
    threshold = _each(256 * (1 - strength_B.abs()))
    return torch.where(levels < threshold, levels, 255 - levels)


def brightness(levels: Levels, strength_B: Tensor) -> Levels:
    """Blended with black."""
    return _blend(torch.zeros_like(levels), levels, strength_B)


def color(levels: Levels, strength_B: Tensor) -> Levels:
    """Blended with its grey image; grey images stay."""
    return _blend(_grey(levels).expand_as(levels), levels, strength_B)


def contrast(levels: Levels, strength_B: Tensor) -> Levels:
    """Blended with the mean of its grey image."""
    mean = (_grey(levels).mean((-3, -2, -1), keepdim=True) + 0.5).floor()
    return _blend(mean.expand_as(levels), levels, strength_B)


def sharpness(levels: Levels, strength_B: Tensor) -> Levels:
    """Blended with the image smoothed by (1 1 1; 1 5 1; 1 1 1) / 13, whose border stays."""
    if min(levels.shape[-2:]) < 3:
        return levels
    kernel = torch.ones(1, 1, 3, 3, dtype=levels.dtype, device=levels.device)
    kernel[..., 1, 1] = 5
    smooth = levels.clone()
    inner = F.conv2d(levels.flatten(0, 1)[:, None], kernel).view_as(smooth[..., 1:-1, 1:-1])
    smooth[..., 1:-1, 1:-1] = (inner / 13 + 0.5).floor()
    return _blend(smooth, levels, strength_B)


def rotate(levels: Levels, strength_B: Tensor) -> Levels:
    """Turned around the centre, counterclockwise where the strength is above 0."""
    angle = strength_B * math.radians(30)
    return _moved(levels, ((angle.cos(), -angle.sin(), 0.0), (angle.sin(), angle.cos(), 0.0)))


def shear_x(levels: Levels, strength_B: Tensor) -> Levels:
    """Rows shifted in proportion to their distance from the middle one."""
    return _moved(levels, ((1.0, 0.3 * strength_B, 0.0), (0.0, 1.0, 0.0)))


def shear_y(levels: Levels, strength_B: Tensor) -> Levels:
    """Columns shifted in proportion to their distance from the middle one."""
    return _moved(levels, ((1.0, 0.0, 0.0), (0.3 * strength_B, 1.0, 0.0)))


def translate_x(levels: Levels, strength_B: Tensor) -> Levels:
    """Shifted sideways by whole pixels."""
    shift = (strength_B * (150 / 331) * levels.shape[-1]).trunc()
    return _moved(levels, ((1.0, 0.0, shift), (0.0, 1.0, 0.0)))


def translate_y(levels: Levels, strength_B: Tensor) -> Levels:
    """Shifted up or down by whole pixels."""
    shift = (strength_B * (150 / 331) * levels.shape[-2]).trunc()
    return _moved(levels, ((1.0, 0.0, 0.0), (0.0, 1.0, shift)))


OPERATIONS: dict[str, Callable[[Levels, Tensor], Levels]] = {
    operation.__name__: operation
    for operation in (
        *(identity, autocontrast, equalize, rotate, shear_x, shear_y, translate_x, translate_y),
        *(brightness, color, contrast, sharpness, posterize, solarize),
    )
}
"""From images and the strength m of each, signed, to images."""


def _each(numbers_B: Tensor) -> Tensor:
    return numbers_B[:, None, None, None]


def _grey(levels: Tensor) -> Tensor:
    """Luma (ITU-R 601-2) of colour images, (B, 1, H, W); others stay. All sums are whole numbers below 2^24."""
    if levels.shape[1] != 3:
        return levels
    red, green, blue = levels.split(1, dim=1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()


def _blend(other: Tensor, levels: Tensor, strength_B: Tensor) -> Tensor:
    return (other + _each(1 + 0.9 * strength_B) * (levels - other)).clamp(0, 255).floor()


def _moved(levels: Tensor, matrix: tuple[tuple[Tensor | float, ...], ...]) -> Tensor:
    """Nearest pixels at ``matrix (x, y, 1)`` for each pixel (x, y), counted from the centre; black outside."""
    height, width = levels.shape[-2:]
    y = torch.arange(height, device=levels.device, dtype=levels.dtype) - (height - 1) / 2
    x = torch.arange(width, device=levels.device, dtype=levels.dtype) - (width - 1) / 2

    def at(row: tuple[Tensor | float, ...]) -> Tensor:
        a, b, c = (e[:, None, None] if isinstance(e, Tensor) else e for e in row)
        return a * x[None, None, :] + b * y[None, :, None] + c

    across, down = (at(row) + (side - 1) / 2 for row, side in zip(matrix, (width, height), strict=True))
    across, down = (place.expand(len(levels), height, width).round().long() for place in (across, down))
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    number = torch.arange(len(levels), device=levels.device)[:, None, None]
    found = levels[number, :, down.clamp(0, height - 1), across.clamp(0, width - 1)].permute(0, 3, 1, 2)
    return found * inside[:, None]
