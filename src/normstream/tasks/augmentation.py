"""What is done to images in training, on the batch and on its device, drawn from torch's generators.

Shape suffixes: B images, C channels, H height, W width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from normstream.data.image_config import AugmentationConfig
from normstream.tasks.rand_augment import rand_augment


class Mixed(NamedTuple):
    """Images, and what they show: ``weight`` of the label and ``1 - weight`` of the other one.

    >>> Mixed(torch.zeros(1, 1, 2, 2), torch.tensor([3]), torch.tensor([3]), 1.0).weight
    1.0
    """

    images_BCHW: Tensor
    labels_B: Tensor
    others_B: Tensor
    weight: float


def augment(images_BCHW: Float[Tensor, "B C H W"], labels_B: Int[Tensor, " B"], config: AugmentationConfig) -> Mixed:
    """Crop, flip, RandAugment, then mixup or CutMix, each if the configuration has it.

    >>> augment(torch.zeros(2, 1, 4, 4), torch.tensor([3, 4]), AugmentationConfig()).weight
    1.0
    """
    if config.crop_padding:
        images_BCHW = random_crop(images_BCHW, config.crop_padding)
    if config.flip:
        images_BCHW = random_flip(images_BCHW)
    if config.rand_ops:
        images_BCHW = rand_augment(images_BCHW, config.rand_ops, config.rand_magnitude)
    if not config.mixes:
        return Mixed(images_BCHW, labels_B, labels_B, 1.0)
    cuts = config.cutmix > 0 and (config.mixup == 0 or _uniform() < config.cutmix_probability)
    return (cutmix if cuts else mixup)(images_BCHW, labels_B, config.cutmix if cuts else config.mixup)


def random_crop(images_BCHW: Float[Tensor, "B C H W"], padding: int) -> Float[Tensor, "B C H W"]:
    """A part of each image's own size, from anywhere in the image with ``padding`` black pixels on each side.

    >>> random_crop(torch.ones(2, 1, 4, 4), padding=2).shape
    torch.Size([2, 1, 4, 4])
    """
    batch, _, height, width = images_BCHW.shape
    device = images_BCHW.device
    padded = F.pad(images_BCHW, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, batch, 1), device=device)
    rows, columns = top + torch.arange(height, device=device), left + torch.arange(width, device=device)
    images = torch.arange(batch, device=device)
    return padded[images[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_flip(images_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """Each image, or with probability 1/2 its mirror image, left to right.

    >>> random_flip(torch.ones(2, 1, 4, 4)).shape
    torch.Size([2, 1, 4, 4])
    """
    mirrored_B = torch.rand(len(images_BCHW), device=images_BCHW.device) < 0.5
    return torch.where(mirrored_B[:, None, None, None], images_BCHW.flip(-1), images_BCHW)


def mixup(images_BCHW: Float[Tensor, "B C H W"], labels_B: Int[Tensor, " B"], alpha: float) -> Mixed:
    """``w a + (1 - w) b`` with one w from Beta(alpha, alpha); b is the image in the same place from the batch's end.

    Source: Zhang et al. 2017, arXiv 1710.09412; one w a batch and its order as in rwightman/timm:timm/data/mixup.py.

    >>> mixed = mixup(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), torch.tensor([3, 4]), alpha=1.0)
    >>> abs(mixed.images_BCHW.flatten()[1].item() - mixed.weight) < 1e-6
    True
    """
    weight = _beta(alpha)
    mixed = weight * images_BCHW + (1 - weight) * images_BCHW.flip(0)
    return Mixed(mixed, labels_B, labels_B.flip(0), weight)


def cutmix(images_BCHW: Float[Tensor, "B C H W"], labels_B: Int[Tensor, " B"], alpha: float) -> Mixed:
    """A box of image b, pasted into the same place of image a; ``weight`` is the part of a that is left.

    The box has the sides ``sqrt(1 - w) H`` and ``sqrt(1 - w) W`` with w from Beta(alpha, alpha) and its centre
    anywhere in the image; what lies outside is cut off. b is found as in ``mixup``.

    Source: Yun et al. 2019, arXiv 1905.04899.

    >>> mixed = cutmix(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4), torch.tensor([3, 4]), alpha=1.0)
    >>> abs(mixed.images_BCHW[1].mean().item() - mixed.weight) < 1e-6
    True
    """
    height, width = images_BCHW.shape[-2:]
    part = (1 - _beta(alpha)) ** 0.5
    top, bottom = _side(height, part)
    left, right = _side(width, part)
    mixed = images_BCHW.clone()
    mixed[..., top:bottom, left:right] = images_BCHW.flip(0)[..., top:bottom, left:right]
    weight = 1 - (bottom - top) * (right - left) / (height * width)
    return Mixed(mixed, labels_B, labels_B.flip(0), weight)


def _side(length: int, part: float) -> tuple[int, int]:
    """Where a box of this part of the length starts and ends, its centre anywhere."""
    centre, half = int(_uniform() * length), int(part * length) // 2
    return max(0, centre - half), min(length, centre + half)


def _uniform() -> float:
    return torch.rand(()).item()  # on the CPU: nothing waits for a device


def _beta(alpha: float) -> float:
    return torch.distributions.Beta(alpha, alpha).sample().item()
