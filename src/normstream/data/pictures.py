"""Images that are still in files, opened and decoded when they are needed.

Shape suffixes: N images, C channels, S height and width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Pictures:
    """Labelled images, not decoded yet.

    >>> from PIL import Image
    >>> pictures = Pictures(lambda number: Image.new("L", (4, 6), number), ("a", "b"), np.array([0, 1]))
    >>> decode(pictures, [1], size=2, channels=1).tolist()
    [[[[1, 1], [1, 1]]]]
    """

    open: Callable[[int], Any]
    """From a number to the image as pillow has it."""
    names: Sequence[str]
    """What errors call each, and what the data is recognized by."""
    labels: np.ndarray
    """The number of each one's class, int64."""

    def take(self, numbers: np.ndarray) -> "Pictures":
        """Those with these numbers."""
        names = tuple(self.names[int(number)] for number in numbers)
        return Pictures(lambda number: self.open(int(numbers[number])), names, self.labels[numbers])


Splits = dict[str, Pictures]
"""train, and validation where the data has it."""


def decode(pictures: Pictures, numbers: Sequence[int] | np.ndarray, size: int, channels: int) -> np.ndarray:
    """Images as uint8 (N, C, S, S): the largest square around the centre, resized (bicubic) if it is of another size.

    Raises ValueError, naming the image, if it cannot be read or has more than 8 bits a channel.
    """
    from PIL import Image, ImageOps

    pixels_NCSS = np.empty((len(numbers), channels, size, size), np.uint8)
    for row, number in zip(pixels_NCSS, numbers, strict=True):
        name = pictures.names[int(number)]
        with reading(name), pictures.open(int(number)) as image:
            image.load()
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"{name} has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits")
        image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (size, size):
            image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
        row[:] = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
    return pixels_NCSS


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns what pillow raises for a broken file into a ValueError that names it.

    >>> with reading("a.png"):
    ...     raise OSError("image file is truncated")
    Traceback (most recent call last):
    ValueError: a.png is no image that can be read: image file is truncated; remove it or replace it
    """
    from PIL import Image

    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} is no image that can be read: {error}; remove it or replace it") from error


def common_size(pictures: Pictures) -> int:
    """Height and width of all images.

    Raises ValueError, naming an image, if one is no square or has another size than the first.

    >>> from PIL import Image
    >>> common_size(Pictures(lambda number: Image.new("L", (4, 4)), ("a", "b"), np.array([0, 1])))
    4
    """
    side = None
    for number, name in enumerate(pictures.names):
        with reading(name), pictures.open(number) as image:
            width, height = image.size
        side = width if side is None else side
        if (width, height) != (side, side):
            raise ValueError(
                f"images must be square and of one size, but {name} has {height} x {width} pixels and the first one is "
                f"{side} wide; give image_size, to which all are then cut and resized"
            )
    if side is None:
        raise ValueError("there is no image; give some")
    return side


class Rows(Sequence):
    """Names of numbered rows, made when they are asked for.

    >>> Rows("row ", 3)[2]
    'row 2'
    """

    def __init__(self, prefix: str, n_rows: int) -> None:
        self.prefix, self.n_rows = prefix, n_rows

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.n_rows:
            raise IndexError(number)
        return f"{self.prefix}{number}"
