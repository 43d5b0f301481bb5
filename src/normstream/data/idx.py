"""IDX, the file format of MNIST, and the data set that Debian ships in it: Fashion-MNIST."""

import gzip
from pathlib import Path

import numpy as np

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> np.ndarray:
    """The array of unsigned bytes in an IDX file, compressed by gzip if it ends in .gz.

    The format is two zero bytes, a type (8: unsigned byte), the number of axes, their lengths as big-endian 32-bit
    numbers, and the values. Source: Yann LeCun's page of MNIST.

    Raises ValueError, naming the file, if it is no such file or is cut off.

    >>> path = getfixture("tmp_path") / "a-idx1-ubyte"
    >>> path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]))
    10
    >>> read_idx(path).tolist()
    [7, 9]
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if len(data) < 4 or data[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
        raise ValueError(f"{path} is no IDX file of unsigned bytes: it starts with {data[:4].hex(' ')}")
    n_axes = data[3]
    start = 4 + 4 * n_axes
    shape = tuple(np.frombuffer(data[4:start], ">u4").tolist()) if len(data) >= start else ()
    values = np.frombuffer(data, np.uint8, offset=min(start, len(data)))
    if len(shape) != n_axes or len(values) != int(np.prod(shape)):
        raise ValueError(f"{path} is cut off or too long: it holds {len(values)} values for an array of shape {shape}")
    return values.reshape(shape)


def read_fashion_mnist(folder: Path = FASHION_MNIST) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images (n, 28, 28) and labels (n,) of Fashion-MNIST by split: 60,000 for training and 10,000 for testing.

    Raises ValueError, with the command that installs the data, if it is not there.

    Source: Xiao et al. 2017, arXiv 1708.07747.

    >>> read_fashion_mnist(Path("no/such/folder"))
    Traceback (most recent call last):
    ValueError: no Fashion-MNIST in no/such/folder: apt-get install dataset-fashion-mnist
    """
    if not folder.is_dir():
        raise ValueError(f"no Fashion-MNIST in {folder}: apt-get install dataset-fashion-mnist")
    splits = {}
    for split, stem in (("train", "train"), ("validation", "t10k")):
        images, labels = (read_idx(folder / f"{stem}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise ValueError(f"{folder}: {stem} has images {images.shape} and labels {labels.shape}; install it again")
        splits[split] = images, labels.astype(np.int64)
    return splits
