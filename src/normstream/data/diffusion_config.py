"""Which images a diffusion model learns, how noise is put on them, and how its samples are judged."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from normstream.checks import check_types
from normstream.diffusion.process import Schedule
from normstream.diffusion.sampling import SamplingConfig
from normstream.names import check_choice


@dataclass(frozen=True)
class DiffusionDataConfig:
    """The images, the noise and the samples; ``load_diffusion_images`` makes an ``ImageData`` of it.

    Raises ValueError for a number out of range.

    >>> DiffusionDataConfig(schedule="cosine").source
    'shapes'
    """

    source: Annotated[str, arg(aliases=("--data",))] = "shapes"
    """shapes (generated, in colour, of 16 x 16 pixels), digits, fashion-mnist, hf:NAME, or the path of a folder that
    has a folder of images for each class; see the task vision."""
    image_size: int | None = None
    """Height and width: images are cut to a square around their centre and resized; None keeps those of the data."""
    channels: int | None = None
    """1 (grey) or 3 (colour); None keeps those of the data."""
    max_images: int | None = None
    """Use at most so many images of each split; None: all, and of shapes 8192 in training and 2048 held out."""
    validation_fraction: float = 0.2
    """The part of each class that is held out where the data has no validation split of its own."""
    seed: int = 0
    """Of generated shapes."""
    schedule: Schedule = "cosine"
    """How the noise grows: linear (DiT) or cosine, which small images are better served by."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How samples are drawn, to be looked at and judged."""
    samples: int = 96
    """Images that are drawn after the last step and judged, as many of each class as of any other."""
    shown: int = 8
    """Of each class, how many of them are in samples.png."""
    feature_extractor: Path | None = None
    """Run folder of a classifier of such images (task vision), or a folder of train_feature_extractor, whose features
    samples are judged in; None trains a small one on the training split."""

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("schedule", self.schedule, Schedule)
        for name in ("image_size", "max_images", "shown"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, for statistics of them, got {self.samples}")
        if self.source == "shapes" and self.channels not in (None, 3):
            raise ValueError(f"shapes have 3 channels, got channels {self.channels}; leave it out")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (colour), got {self.channels}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
