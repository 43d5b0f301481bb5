"""Images from every source, their split, and what is said of broken ones."""

import gzip
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from normstream.data import Loader, idx, images
from normstream.data.batches import AnyBatch, Samples
from normstream.data.idx import FASHION_MNIST, read_fashion_mnist, read_idx
from normstream.data.images import DecodedLater, ImageDataConfig, load_images
from normstream.tasks import TaskData

HAS_FASHION = pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="dataset-fashion-mnist is not installed")


def picture(number: int, size: tuple[int, int] = (6, 6), mode: str = "RGB") -> Image.Image:
    generator = np.random.default_rng(number)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    return Image.fromarray(generator.integers(0, 256, (*size[::-1], *channels), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, of five and ten images."""
    for label, count in (("cat", 5), ("dog", 10)):
        (tmp_path / label).mkdir()
        for number in range(count):
            picture(number + 100 * count).save(tmp_path / label / f"{number}.png")
    return tmp_path


def test_digits_are_those_of_scikit_learn():
    data = load_images(ImageDataConfig())
    assert isinstance(data, TaskData)
    assert isinstance(data.train, Samples)
    assert (data.image_size, data.channels, data.classes) == (8, 1, tuple("0123456789"))
    digits: Any = load_digits()
    wanted = sorted(zip(np.rint(digits.images.reshape(-1, 64) * 255 / 16).tolist(), digits.target, strict=True))
    halves = [data.train.batch(range(len(data.train))), data.validation.batch(range(len(data.validation)))]
    pixels = torch.cat([half.pixels_BCHW.flatten(1) for half in halves]).tolist()
    labels = torch.cat([half.labels_B for half in halves]).tolist()
    assert sorted(zip(pixels, labels, strict=True)) == wanted
    assert isinstance(halves[0], AnyBatch)
    torch.testing.assert_close(halves[0].images_BCHW[0, 0, 0], halves[0].pixels_BCHW[0, 0, 0] / 255)


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5])
def test_split_is_stratified_and_fixed(fraction: float):
    data = load_images(ImageDataConfig(validation_fraction=fraction))
    digits: Any = load_digits()
    totals = np.bincount(digits.target)
    held_out = np.bincount(data.validation.labels)
    assert held_out.tolist() == [max(1, round(fraction * total)) for total in totals]
    assert (np.bincount(data.train.labels) + held_out).tolist() == totals.tolist()
    again = load_images(ImageDataConfig(validation_fraction=fraction))
    assert again.corpus_hash == data.corpus_hash
    assert np.array_equal(again.validation.pixels, data.validation.pixels)
    assert load_images(ImageDataConfig(validation_fraction=0.3)).corpus_hash != data.corpus_hash


def test_statistics_of_the_training_split():
    data = load_images(ImageDataConfig())
    (mean,), (std,) = data.statistics
    values = torch.from_numpy(data.train.pixels).double() / 255
    assert mean == pytest.approx(values.mean().item(), abs=1e-6)
    assert std == pytest.approx(values.std(correction=0).item(), abs=1e-6)


def test_statistics_of_flat_channels(folder: Path):
    for path in folder.glob("*/*.png"):
        Image.new("RGB", (4, 4), (255, 0, 51)).save(path)
    assert load_images(ImageDataConfig(source=str(folder))).statistics == ((1.0, 0.0, 0.2), (1.0, 1.0, 1.0))


def test_other_size_and_channels():
    data = load_images(ImageDataConfig(image_size=12, channels=3, max_images=20))
    assert data.train.pixels.shape == (20, 3, 12, 12)
    assert data.validation.pixels.shape == (20, 3, 12, 12)
    assert (data.train.pixels[:, 0] == data.train.pixels[:, 2]).all()
    small = load_images(ImageDataConfig(max_images=20))
    wanted = Image.fromarray(small.train.pixels[3, 0]).resize((12, 12), Image.Resampling.BICUBIC)
    assert np.array_equal(data.train.pixels[3, 0], np.asarray(wanted))
    all_labels = load_images(ImageDataConfig()).train.labels
    assert small.train.labels.tolist() == [all_labels[n * len(all_labels) // 20] for n in range(20)]


@HAS_FASHION
def test_fashion_mnist_has_its_own_split():
    """Sizes, balance, mean and standard deviation that everybody who uses the data quotes."""
    data = load_images(ImageDataConfig(source="fashion-mnist"))
    assert (len(data.train), len(data.validation), data.image_size) == (60_000, 10_000, 28)
    assert np.bincount(data.train.labels).tolist() == [6000] * 10
    assert np.bincount(data.validation.labels).tolist() == [1000] * 10
    (mean,), (std,) = data.statistics
    assert (round(mean, 4), round(std, 4)) == (0.2860, 0.3530)
    assert data.train.labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert data.classes[9] == "Ankle boot"


def test_fashion_mnist_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(images, "read_fashion_mnist", lambda: read_fashion_mnist(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no Fashion-MNIST in .*nowhere: apt-get install dataset-fashion-mnist"):
        load_images(ImageDataConfig(source="fashion-mnist"))


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def test_idx_files(tmp_path: Path):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "a").write_bytes(idx_bytes(array))
    (tmp_path / "b.gz").write_bytes(gzip.compress(idx_bytes(array)))
    assert np.array_equal(read_idx(tmp_path / "a"), array)
    assert np.array_equal(read_idx(tmp_path / "b.gz"), array)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a", lambda data: data[:-1], "is cut off or too long: it holds 23 values"),
        ("a", lambda data: data + b"x", "is cut off or too long: it holds 25 values"),
        ("a", lambda data: data[:6], "is cut off"),
        ("a", lambda data: b"PNG!" + data, "is no IDX file of unsigned bytes: it starts with 50 4e"),
        ("a", lambda data: b"", "is no IDX file"),
        ("a.gz", lambda data: gzip.compress(data)[:-9], "cannot read"),
        ("a.gz", lambda data: data, "cannot read"),
    ],
)
def test_broken_idx_files(tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str):
    (tmp_path / name).write_bytes(change(idx_bytes(np.zeros((2, 3, 4), np.uint8))))
    with pytest.raises(ValueError, match=message) as error:
        read_idx(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_fashion_mnist_whose_files_do_not_fit(tmp_path: Path):
    for stem, n_labels in (("train", 2), ("t10k", 3)):
        (tmp_path / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros((2, 4, 4), np.uint8))))
        (tmp_path / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(n_labels, np.uint8))))
    with pytest.raises(ValueError, match=r"t10k has images \(2, 4, 4\) and labels \(3,\)"):
        idx.read_fashion_mnist(tmp_path)


def test_folder_of_classes(folder: Path):
    (folder / "dog" / ".hidden").write_text("no image")
    data = load_images(ImageDataConfig(source=str(folder)))
    assert (data.classes, data.image_size, data.channels) == (("cat", "dog"), 6, 3)
    assert np.bincount(data.train.labels).tolist() == [4, 8]
    assert np.bincount(data.validation.labels).tolist() == [1, 2]
    known = {np.asarray(Image.open(path)).tobytes(): path.parent.name for path in folder.glob("*/*.png")}
    for split in (data.train, data.validation):
        batch = split.batch(range(len(split)))
        for pixels, label in zip(batch.pixels_BCHW, batch.labels_B, strict=True):
            assert known.pop(pixels.permute(1, 2, 0).numpy().tobytes()) == data.classes[label]
    assert not known


def test_folder_with_train_and_val(tmp_path: Path):
    for number, place in enumerate(("train/a", "train/b", "val/b", "val/a", "test/a")):
        (tmp_path / place).mkdir(parents=True)
        picture(number).save(tmp_path / place / "x.png")
    data = load_images(ImageDataConfig(source=str(tmp_path)))
    assert data.classes == ("a", "b")
    assert data.train.labels.tolist() == data.validation.labels.tolist() == [0, 1]
    assert np.array_equal(data.validation.pixels[0], np.asarray(picture(3)).transpose(2, 0, 1))
    (tmp_path / "val" / "c").mkdir()
    with pytest.raises(ValueError, match=r"val.c is a class that the training split does not have; it has a, b"):
        load_images(ImageDataConfig(source=str(tmp_path)))


def test_images_are_cut_to_their_centre(tmp_path: Path):
    (tmp_path / "a").mkdir()
    wide = np.zeros((4, 8), np.uint8)
    wide[:, 2:6] = np.arange(16).reshape(4, 4) * 10
    for number in range(2):
        Image.fromarray(wide).save(tmp_path / "a" / f"{number}.png")
    data = load_images(ImageDataConfig(source=str(tmp_path), image_size=4, channels=1))
    assert np.array_equal(data.train.pixels[0, 0], wide[:, 2:6])


def test_large_sets_are_decoded_later_to_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch):
    config = ImageDataConfig(source=str(folder), image_size=5)
    kept = load_images(config)
    monkeypatch.setattr(images, "IN_MEMORY", 100)
    later = load_images(config)
    assert isinstance(later.train.pixels, DecodedLater)
    assert np.array_equal(later.train.labels, kept.train.labels)
    order = [3, 0, 11, 3]
    assert torch.equal(later.train.batch(order).pixels_BCHW, kept.train.batch(order).pixels_BCHW)
    assert later.statistics == kept.statistics
    monkeypatch.setattr(images, "STATISTICS_FROM", 3)
    few = torch.from_numpy(kept.train.pixels[[0, 4, 8]]).double() / 255
    assert load_images(config).statistics[0] == pytest.approx(few.mean((0, 2, 3)).tolist(), abs=1e-6)
    assert later.corpus_hash == load_images(config).corpus_hash
    (folder / "cat" / "0.png").rename(folder / "cat" / "00.png")
    assert later.corpus_hash != load_images(config).corpus_hash


def test_batches_of_a_loader_are_repeatable(folder: Path):
    data = load_images(ImageDataConfig(source=str(folder)))
    loader = Loader(data.train, batch_size=5, seed=0)
    batch, again = loader.batch(1), Loader(data.train, batch_size=5, seed=0).batch(1)
    assert torch.equal(batch.pixels_BCHW, again.pixels_BCHW)
    assert batch.n_targets == 5
    micro = list(loader.batch(0).split(5))
    assert [m.n_targets for m in micro] == [1] * 5
    assert torch.equal(torch.cat([m.pixels_BCHW for m in micro]), loader.batch(0).pixels_BCHW)
    for number in (-1, len(data.train)):
        with pytest.raises(IndexError, match="sample numbers must lie in"):
            data.train.batch([number])


def broken(folder: Path, content: bytes) -> None:
    (folder / "dog" / "5.png").write_bytes(content)


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("kind", ["cut off", "text", "empty"])
def test_files_that_are_no_images(folder: Path, kind: str, lazily: bool, monkeypatch: pytest.MonkeyPatch):
    whole = (folder / "dog" / "5.png").read_bytes()
    broken(folder, {"cut off": whole[: len(whole) // 2], "text": b"not an image", "empty": b""}[kind])
    if lazily:
        monkeypatch.setattr(images, "IN_MEMORY", 0)

    def use_all() -> None:
        data = load_images(ImageDataConfig(source=str(folder), image_size=6))
        for split in (data.train, data.validation):
            split.batch(range(len(split)))

    with pytest.raises(ValueError, match=r"dog.5\.png is no image that can be read: .*; remove it or replace it"):
        use_all()


def test_sixteen_bits_are_refused_not_clipped(folder: Path):
    Image.fromarray(np.full((6, 6), 40_000, np.uint16)).save(folder / "dog" / "5.png")
    with pytest.raises(ValueError, match=r"5\.png has more than 8 bits a channel \(mode I;16\); convert it"):
        load_images(ImageDataConfig(source=str(folder), channels=1))


def test_sizes_that_differ(folder: Path):
    picture(1, size=(6, 7)).save(folder / "dog" / "5.png")
    with pytest.raises(ValueError, match=r"5\.png has 7 x 6 pixels and the first one is 6 wide; give image_size"):
        load_images(ImageDataConfig(source=str(folder)))
    assert load_images(ImageDataConfig(source=str(folder), image_size=6)).train.pixels.shape == (12, 3, 6, 6)


def test_folders_that_are_no_data_set(tmp_path: Path):
    config = ImageDataConfig(source=str(tmp_path))
    with pytest.raises(ValueError, match="has no folder; it needs one of images for each class"):
        load_images(config)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match=r"class .*cat has no image"):
        load_images(config)
    picture(0).save(tmp_path / "cat" / "0.png")
    with pytest.raises(ValueError, match=r"the validation split of .* has no image; give more of them"):
        load_images(config)
    picture(0).save(tmp_path / "stray.png")
    with pytest.raises(ValueError, match=r"stray\.png is in no class"):
        load_images(config)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_modes_become_the_channels_asked_for(folder: Path, mode: str, channels: int):
    picture(1, mode=mode).save(folder / "dog" / "5.png")
    data = load_images(replace(ImageDataConfig(), source=str(folder), channels=channels))
    assert data.train.pixels.shape == (12, channels, 6, 6)


@pytest.fixture
def hub(tmp_path: Path) -> Callable[..., str]:
    """Writes a data set of the Hugging Face library to a folder that it can load by its path."""
    datasets = pytest.importorskip("datasets")

    def write(columns: dict[str, object], features: dict[str, object], **splits: int) -> str:
        for split, count in splits.items():
            rows = {name: list(values)[:count] for name, values in columns.items()}  # pyright: ignore
            datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(
                tmp_path / f"{split}.parquet"
            )
        return f"hf:{tmp_path}"

    return write


@pytest.mark.parametrize(("image", "label", "split"), [("image", "label", "test"), ("img", "fine_label", "validation")])
def test_hub_data_sets(hub, image: str, label: str, split: str):
    import datasets

    columns = {image: [picture(n) for n in range(8)], "coarse": [0] * 8, label: [2, 0, 1, 1, 0, 2, 2, 0]}
    kinds = {image: datasets.Image(), "coarse": datasets.ClassLabel(names=["x"])}
    source = hub(columns, kinds | {label: datasets.ClassLabel(names=["c", "a", "b"])}, train=8, **{split: 3})
    data = load_images(ImageDataConfig(source=source))
    assert (data.classes, data.image_size, data.channels) == (("c", "a", "b"), 6, 3)
    assert data.train.labels.tolist() == columns[label]
    assert data.validation.labels.tolist() == [2, 0, 1]
    assert np.array_equal(data.train.pixels[5], np.asarray(picture(5)).transpose(2, 0, 1))


def test_hub_data_set_with_words_as_labels_and_no_split(hub):
    import datasets

    words = ["dog", "cat"] * 5
    source = hub({"picture": [picture(n) for n in range(10)], "labels": words},
                 {"picture": datasets.Image(), "labels": datasets.Value("string")}, train=10)  # fmt: skip
    data = load_images(ImageDataConfig(source=source))
    assert data.classes == ("cat", "dog")
    assert np.bincount(data.train.labels).tolist() == [4, 4]


def test_hub_columns_that_are_missing(hub):
    import datasets

    text = {"words": ["a", "b"], "label": [0, 1]}
    source = hub(text, {"words": datasets.Value("string"), "label": datasets.Value("int64")}, train=2)
    with pytest.raises(ValueError, match=r"no column of images in data set .*; its columns: words, label; rename one"):
        load_images(ImageDataConfig(source=source))


def test_hub_label_that_training_does_not_have(hub):
    import datasets

    rows = {"image": [picture(n) for n in range(3)], "label": [0, 1, -1]}
    source = hub(rows, {"image": datasets.Image(), "label": datasets.Value("int64")}, train=2, test=3)
    with pytest.raises(ValueError, match=r"split test of data set .* has label -1, which is no class of train"):
        load_images(ImageDataConfig(source=source))


def test_hub_data_set_that_is_not_there(tmp_path: Path):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="cannot read data set"):
        load_images(ImageDataConfig(source=f"hf:{tmp_path / 'nowhere'}"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("digts", r"unknown source 'digts'; did you mean 'digits'\?"),
        ("", "unknown source ''"),
        ("no/such/folder", "no folder no/such/folder; give digits"),
    ],
)
def test_unknown_sources(source: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_images(ImageDataConfig(source=source))


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"channels": 2}, r"channels must be 1 \(grey\) or 3 \(colour\), got 2"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie between 0 and 1"),
        ({"max_images": 0}, "max_images must be at least 1"),
        ({"image_size": 8.5}, "image_size must be of type int or None"),
    ],
)
def test_wrong_configurations(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        ImageDataConfig(**changes)  # pyright: ignore[reportArgumentType]
