"""A folder of images for each class."""

from pathlib import Path
from typing import Any

import numpy as np

from normstream.data.extras import import_extra
from normstream.data.pictures import Pictures, Splits


def read_folder(source: str) -> tuple[Splits, tuple[str, ...]]:
    """The images in ``folder/class/``, or in ``folder/train/class/`` and ``folder/val/class/``, and the classes' names.

    Classes are in the order of their names. Hidden files are left out, every other file has to be an image.

    Raises ValueError if there is no such folder or class, if a class has no image, or if the validation split has a
    class of its own; ImportError without the extra [vision].

    >>> read_folder("no/such/folder")
    Traceback (most recent call last):
    ValueError: no folder no/such/folder; give digits, fashion-mnist, hf:NAME or a folder with ...
    """
    root = Path(source).expanduser()
    if not root.is_dir():
        raise ValueError(
            f"no folder {source}; give digits, fashion-mnist, hf:NAME or a folder with one of images for each class"
        )
    import_extra("PIL.Image", "vision")
    parts = {"train": root / "train", "validation": root / "val"}
    if not all(part.is_dir() for part in parts.values()):
        parts = {"train": root}
    classes = tuple(folder.name for folder in _visible(parts["train"]) if folder.is_dir())
    if not classes:
        raise ValueError(f"{parts['train']} has no folder; it needs one of images for each class")
    return {split: _class_folders(part, classes) for split, part in parts.items()}, classes


def _class_folders(root: Path, classes: tuple[str, ...]) -> Pictures:
    files, labels = [], []
    for folder in _visible(root):
        if not folder.is_dir():
            raise ValueError(f"{folder} is in no class; put it into the folder of its class, or remove it")
        if folder.name not in classes:
            raise ValueError(f"{folder} is a class that the training split does not have; it has {', '.join(classes)}")
        found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        if not found:
            raise ValueError(f"class {folder} has no image; put some there or remove it")
        files += found
        labels += [classes.index(folder.name)] * len(found)

    def open_file(number: int) -> Any:
        from PIL import Image

        return Image.open(files[number])

    return Pictures(open_file, [str(path) for path in files], np.array(labels, np.int64))


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
