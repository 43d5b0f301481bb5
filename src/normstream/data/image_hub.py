"""Labelled images from a Hugging Face data set."""

from typing import Any

import numpy as np

from normstream.data.extras import import_extra
from normstream.data.pictures import Pictures, Rows, Splits

HF_PREFIX = "hf:"
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
VALIDATION_SPLITS = ("validation", "valid", "val", "test")


def read_hub(source: str) -> tuple[Splits, tuple[str, ...]]:
    """The images of a Hugging Face data set by split, and the names of its classes.

    The column of images is called image or img, or is the one with images; that of labels label, labels or fine_label,
    or is the one with classes. Its validation split is validation, valid, val or else test.

    Raises ValueError if the data set, its training split or a column is not found; ImportError without the extra [hf].

    >>> read_hub("hf:")
    Traceback (most recent call last):
    ValueError: source 'hf:' names no data set; expected hf:NAME or hf:NAME:CONFIG
    """
    name, _, subset = source.removeprefix(HF_PREFIX).partition(":")
    if not name:
        raise ValueError(f"source {source!r} names no data set; expected hf:NAME or hf:NAME:CONFIG")
    datasets = import_extra("datasets", "hf")
    import_extra("PIL.Image", "vision")
    try:
        found = datasets.load_dataset(name, subset or None)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read data set {name!r}: {error}") from error
    if "train" not in found:
        raise ValueError(f"data set {name!r} has no split train; it has {', '.join(found)}")
    held_out = [split for split in VALIDATION_SPLITS if split in found]
    chosen = {"train": "train"} | ({"validation": held_out[0]} if held_out else {})
    features = found["train"].features
    image = _column(features, IMAGE_COLUMNS, datasets.Image, f"images in data set {name!r}")
    label = _column(features, LABEL_COLUMNS, datasets.ClassLabel, f"labels in data set {name!r}")
    columns = {split: found[theirs][label] for split, theirs in chosen.items()}
    named = isinstance(features[label], datasets.ClassLabel)
    values = list(range(len(features[label].names))) if named else sorted(set(columns["train"]))
    classes = tuple(features[label].names) if named else tuple(map(str, values))

    def pictures(split: str, theirs: str) -> Pictures:
        rows, place = found[theirs], {value: number for number, value in enumerate(values)}
        wrong = [value for value in columns[split] if value not in place]
        if wrong:
            raise ValueError(f"split {theirs} of data set {name!r} has label {wrong[0]!r}, which is no class of train")
        labels = np.array([place[value] for value in columns[split]], np.int64)
        names = Rows(f"{source}, {theirs}, row ", len(rows))
        return Pictures(lambda number: rows[number][image], names, labels)

    return {split: pictures(split, theirs) for split, theirs in chosen.items()}, classes


def _column(features: Any, names: tuple[str, ...], kind: Any, what: str) -> str:
    """The column with one of these names, else the first of this kind."""
    found = [name for name in names if name in features]
    found += [name for name, feature in features.items() if isinstance(feature, kind)]
    if not found:
        raise ValueError(f"no column of {what}; its columns: {', '.join(features)}; rename one to {names[0]}")
    return found[0]
