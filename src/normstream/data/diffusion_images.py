"""The images of a diffusion model: generated shapes, or those of the task vision."""

import hashlib
from dataclasses import replace

import numpy as np

from normstream.data.diffusion_config import DiffusionDataConfig
from normstream.data.image_config import ImageDataConfig
from normstream.data.images import BUILT_IN, ImageData, Images, load_images
from normstream.data.shapes import SHAPES, draw_shapes
from normstream.names import nearest

SHAPES_SIZE, SHAPES_TRAIN, SHAPES_VALIDATION = 16, 8192, 2048
"""Height and width, and number of images of each split, where the configuration gives none."""
CHUNK = 512
"""Shapes that are drawn at a time."""


def load_diffusion_images(config: DiffusionDataConfig) -> ImageData:
    """Reads or draws the images; raises as ``load_images`` does.

    The held-out shapes follow those of training in number. They are shuffled, since evaluations take every k-th, and
    classes alternate.

    >>> data = load_diffusion_images(DiffusionDataConfig(max_images=12))
    >>> data.classes[:2], data.image_size, len(data.train), len(data.validation)
    (('circle', 'square'), 16, 12, 12)
    """
    if config.source == "shapes":
        return _shapes(config)
    try:
        return replace(load_images(_as_images(config)), config=config)
    except ValueError as error:
        if str(error).startswith("unknown source"):
            known = ["shapes", *BUILT_IN, "hf:NAME", "path/to/folder"]
            raise ValueError(f"unknown source {config.source!r}; {nearest(config.source, known)}") from None
        raise


def _as_images(config: DiffusionDataConfig) -> ImageDataConfig:
    return ImageDataConfig(
        source=config.source,
        image_size=config.image_size,
        channels=config.channels,
        validation_fraction=config.validation_fraction,
        max_images=config.max_images,
    )


def _shapes(config: DiffusionDataConfig) -> ImageData:
    size = config.image_size or SHAPES_SIZE
    n_train, n_validation = (min(config.max_images or n, n) for n in (SHAPES_TRAIN, SHAPES_VALIDATION))
    total = n_train + n_validation
    chunks = [
        draw_shapes(first, min(CHUNK, total - first), size=size, seed=config.seed) for first in range(0, total, CHUNK)
    ]
    pixels, labels = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    digest = hashlib.sha256(f"shapes {n_train} {n_validation} {size}\n".encode() + pixels.tobytes()).hexdigest()
    held_out = n_train + np.random.default_rng(0).permutation(n_validation)
    train, validation = (Images(pixels[rows], labels[rows]) for rows in (np.arange(n_train), held_out))
    return ImageData(config, tuple(SHAPES), size, 3, digest, train, validation)
