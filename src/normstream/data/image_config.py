"""Which labelled images a model is trained on, and what is done to them in training."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from normstream.checks import check_types


@dataclass(frozen=True)
class AugmentationConfig:
    """What happens to images in training, in this order; evaluations see them as they are. All is off by default.

    DeiT: flip, rand_ops 2, rand_magnitude 9, mixup 0.8, cutmix 1.0 and label_smoothing 0.1. CIFAR: crop_padding 4 and
    flip.

    >>> AugmentationConfig(mixup=0.8, cutmix=1.0).mixes
    True
    """

    crop_padding: int = 0
    """Pixels of black around an image, from which a random part of its own size is cut."""
    flip: bool = False
    """Mirror every second image left to right; not for digits."""
    rand_ops: int = 0
    """RandAugment: how many operations, drawn for each image, are done one after another."""
    rand_magnitude: float = 9.0
    """RandAugment: how strong they are, from 0 (nothing) to 10."""
    mixup: float = 0.0
    """alpha of mixup: images become l a + (1 - l) b with l from Beta(alpha, alpha), and labels likewise; 0 is off."""
    cutmix: float = 0.0
    """alpha of CutMix: a box of image b is pasted into a, and labels are weighted by area; 0 is off."""
    cutmix_probability: float = 0.5
    """With both, how often a batch gets CutMix and not mixup."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("crop_padding", "rand_ops"):
            if getattr(self, name) < 0:
                raise ValueError(f"augmentation.{name} must be at least 0, got {getattr(self, name)}")
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"augmentation.{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.rand_magnitude <= 10:
            raise ValueError(f"augmentation.rand_magnitude must be in [0, 10], got {self.rand_magnitude}")
        if not 0 <= self.cutmix_probability <= 1:
            raise ValueError(f"augmentation.cutmix_probability must be in [0, 1], got {self.cutmix_probability}")

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class ImageDataConfig:
    """The images, their labels and their augmentation; ``load_images`` makes an ``ImageData`` of it.

    Raises ValueError for a number out of range.

    >>> ImageDataConfig(source="fashion-mnist").channels is None
    True
    """

    source: Annotated[str, arg(aliases=("--data",))] = "digits"
    """digits (scikit-learn's, extra [vision]), fashion-mnist (Debian's package dataset-fashion-mnist), hf:NAME or
    hf:NAME:CONFIG (extra [hf]), or the path of a folder that has a folder of images for each class (extra [vision]),
    or has train and val with such folders."""
    image_size: int | None = None
    """Height and width: images are cut to a square around their centre and resized; None keeps those of the data,
    which must then be square and all of one size."""
    channels: int | None = None
    """1 (grey) or 3 (colour); None means 1 for digits and fashion-mnist and 3 for others."""
    validation_fraction: float = 0.2
    """The part of each class that is held out where the data has no validation split of its own."""
    max_images: int | None = None
    """Use at most so many images of each split, spread evenly over it."""
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    """What is done to the images in training."""
    teacher: Path | None = None
    """With model.distillation: run folder or checkpoint of the model whose choice the second head learns (DeiT's hard
    distillation); None means that it learns the label."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("image_size", "max_images"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (colour), got {self.channels}")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
