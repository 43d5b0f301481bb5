"""Labelled images as training samples: from an ``ImageDataConfig`` to both splits.

Shape suffixes: B images of a batch, N images, C channels, H height, W width.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normstream.data.batches import split_rows, to_device
from normstream.data.extras import import_extra
from normstream.data.idx import FASHION_CLASSES, read_fashion_mnist
from normstream.data.image_config import ImageDataConfig
from normstream.data.image_folder import read_folder
from normstream.data.image_hub import HF_PREFIX, read_hub
from normstream.data.loader import epoch_order
from normstream.data.pictures import Pictures, Rows, Splits, common_size, decode
from normstream.names import nearest

BUILT_IN = ("digits", "fashion-mnist")
IN_MEMORY = 1 << 30
"""Bytes up to which all images of a data set are decoded once and kept; larger ones are decoded at each use."""
STATISTICS_FROM = 2_000
"""Where images are decoded at each use, so many are decoded for mean and standard deviation."""


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images and their classes.

    >>> ImageBatch(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([3])).images_BCHW.max()
    tensor(1.)
    """

    pixels_BCHW: Tensor
    """uint8."""
    labels_B: Tensor
    """Numbers of classes, int64."""

    @property
    def images_BCHW(self) -> Tensor:
        """The pixels as float32 in [0, 1]."""
        return self.pixels_BCHW.float() / 255

    @property
    def n_targets(self) -> int:
        """The number of images."""
        return len(self.labels_B)

    def to(self, device: torch.device | str) -> "ImageBatch":
        """The same batch on another device."""
        return to_device(self, device)

    def split(self, parts: int) -> Iterator["ImageBatch"]:
        """The batch cut into equal micro-batches."""
        return split_rows(self, parts)


@dataclass(frozen=True, eq=False)
class Images:
    """One split of a data set of images.

    >>> images = Images(np.zeros((3, 1, 8, 8), np.uint8), np.array([0, 1, 0]))
    >>> images.batch([1, 2]).labels_B
    tensor([1, 0])
    """

    pixels: Any
    """uint8 (N, C, H, W): an array, or what gives one for ``pixels[numbers]``."""
    labels: np.ndarray
    """Numbers of classes, int64 (N,)."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> int:
        """The number of images."""
        return len(self.labels)

    @property
    def tokens_per_sample(self) -> float:
        """One: how many positions an image is to a model depends on its patches, see ``Task.tokens_per_sample``."""
        return 1.0

    def batch(self, samples: Sequence[int] | np.ndarray) -> ImageBatch:
        """The images with these numbers, in this order.

        Raises IndexError for a number outside [0, len); ValueError for a file that cannot be decoded.
        """
        numbers = np.asarray(samples, np.int64)
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"sample numbers must lie in [0, {len(self)}), got {numbers.min()} to {numbers.max()}")
        return ImageBatch(torch.from_numpy(self.pixels[numbers]), torch.from_numpy(self.labels[numbers]))

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the pixels in [0, 1], channel by channel, to six digits.

        Of images that are not kept decoded, 2,000 spread evenly over the split are used.

        >>> Images(np.array([[[[0, 255]]]], np.uint8), np.array([0])).statistics()
        ((0.5,), (0.5,))
        """
        count = len(self) if isinstance(self.pixels, np.ndarray) else min(len(self), STATISTICS_FROM)
        chunks = np.array_split(np.arange(count) * len(self) // count, -(-count // 256))
        moments = np.stack([_moments(self.pixels[numbers]) * len(numbers) / count for numbers in chunks]).sum(0)
        mean, square = moments
        std = np.sqrt(np.maximum(square - np.square(mean), 0.0)).round(6)
        return _rounded(mean), _rounded(np.where(std > 0, std, 1.0))


def _moments(pixels_NCHW: np.ndarray) -> np.ndarray:
    """Means of x and of x^2 over images of one size, channel by channel: (2, C)."""
    values = pixels_NCHW.astype(np.float64) / 255
    return np.stack([values.mean((0, 2, 3)), np.square(values).mean((0, 2, 3))])


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values.tolist())


class DecodedLater:
    """What stands for an array of pixels (N, C, H, W) that would be too large: ``[numbers]`` decodes those images."""

    def __init__(self, pictures: Pictures, image_size: int, channels: int) -> None:
        self.pictures, self.image_size, self.channels = pictures, image_size, channels

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        return decode(self.pictures, numbers, self.image_size, self.channels)


@dataclass(frozen=True, eq=False)
class ImageData:
    """Both splits of a data set of images.

    >>> data = load_images(ImageDataConfig())
    >>> len(data.train), len(data.validation), data.image_size
    (1438, 359, 8)
    """

    config: Any
    """What it was made from."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of their numbers."""
    image_size: int
    """Height and width."""
    channels: int
    """1 or 3."""
    corpus_hash: str
    """SHA-256 over classes, labels and pixels and the side that each image is on; of images that are too many to be
    decoded up front, over their names instead of their pixels."""
    train: Images
    """The training split."""
    validation: Images
    """The held-out split."""
    tokenizer: None = None
    """There is none."""

    @cached_property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the training split's pixels, channel by channel."""
        return self.train.statistics()


def load_images(config: ImageDataConfig) -> ImageData:
    """Reads, splits, cuts and resizes the images.

    They are kept as uint8, decoded once, where they take at most 1 GiB (``IN_MEMORY``): 28 x 28 grey images take 0.8
    kB each, 224 x 224 coloured ones 151 kB. Larger data sets are decoded batch by batch.

    Raises ValueError for an unknown source, a file that is no image (it is named), images of different sizes where
    ``image_size`` is not given, and splits without an image; ImportError if the source needs an extra that is not
    installed.

    >>> load_images(ImageDataConfig(source="fashion_mnist"))
    Traceback (most recent call last):
    ValueError: unknown source 'fashion_mnist'; did you mean 'fashion-mnist'? Known: digits, fashion-mnist, ...
    """
    splits, classes, grey = _read(config.source)
    if "validation" not in splits:
        splits = _split(splits["train"], config.validation_fraction)
    if config.max_images is not None:
        splits = {name: _thinned(pictures, config.max_images) for name, pictures in splits.items()}
    for name, pictures in splits.items():
        if len(pictures.labels) == 0:
            raise ValueError(f"the {name} split of {config.source} has no image; give more of them")
    channels = config.channels or (1 if grey else 3)
    size = config.image_size or _common_size(splits)
    total = sum(len(pictures.labels) for pictures in splits.values()) * channels * size**2
    digest = hashlib.sha256(repr(classes).encode())
    halves = []
    for name in ("train", "validation"):
        pictures = splits[name]
        if total <= IN_MEMORY:
            pixels = decode(pictures, range(len(pictures.labels)), size, channels)
            content = pixels.tobytes()
        else:
            pixels = DecodedLater(pictures, size, channels)
            root = str(Path(config.source).expanduser())  # the folder may move
            content = "\n".join(name.removeprefix(root) for name in pictures.names).encode(errors="surrogateescape")
        digest.update(f"{name} {len(pictures.labels)} {channels} {size}\n".encode())
        digest.update(pictures.labels.astype("<i8").tobytes())
        digest.update(content)
        halves.append(Images(pixels, pictures.labels))
    return ImageData(config, classes, size, channels, digest.hexdigest(), *halves)


def _common_size(splits: Splits) -> int:
    sizes = {name: common_size(pictures) for name, pictures in splits.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the splits have images of different sizes, {sizes}; give image_size")
    return sizes["train"]


def _read(source: str) -> tuple[Splits, tuple[str, ...], bool]:
    """Splits, names of the classes, and whether the images are grey."""
    if source == "digits":
        return {"train": _digits()}, tuple("0123456789"), True
    if source == "fashion-mnist":
        splits = read_fashion_mnist()
        return (
            {name: _of_array(*split, f"fashion-mnist, {name}") for name, split in splits.items()},
            FASHION_CLASSES,
            True,
        )
    if source.startswith(HF_PREFIX):
        return *read_hub(source), False
    if not source or not (Path(source).expanduser().exists() or len(Path(source).parts) > 1):
        known = [*BUILT_IN, "hf:NAME", "path/to/folder"]
        raise ValueError(f"unknown source {source!r}; {nearest(source, known)}")
    return *read_folder(source), False


def _digits() -> Pictures:
    """The 1,797 digits of 8 x 8 pixels and 17 shades (Alpaydin and Kaynak 1998) that scikit-learn comes with."""
    digits: Any = import_extra("sklearn.datasets", "vision").load_digits()
    return _of_array(np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64), "digits")


def _of_array(images_NHW: np.ndarray, labels: np.ndarray, name: str) -> Pictures:
    import_extra("PIL.Image", "vision")

    def open_image(number: int) -> Any:
        from PIL import Image

        return Image.fromarray(images_NHW[number])

    return Pictures(open_image, Rows(f"{name}, image ", len(labels)), labels)


def _split(pictures: Pictures, fraction: float) -> Splits:
    """The same part of each class is held out, drawn once and for all; at least one image of a class with two."""
    held_out = np.zeros(len(pictures.labels), bool)
    for label in np.unique(pictures.labels):
        of_class = np.flatnonzero(pictures.labels == label)
        count = min(max(1, round(fraction * len(of_class))), len(of_class) - 1)
        held_out[of_class[epoch_order(len(of_class), seed=0, epoch=int(label))[:count]]] = True
    return {
        name: pictures.take(np.flatnonzero(held_out == side)) for name, side in (("train", False), ("validation", True))
    }


def _thinned(pictures: Pictures, count: int) -> Pictures:
    n_images = len(pictures.labels)
    return pictures if n_images <= count else pictures.take(np.arange(count) * n_images // count)
