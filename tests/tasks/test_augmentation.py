"""Augmentation: closed forms of mixtures, pillow's own operations, and draws that are repeatable."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from normstream.data.image_config import AugmentationConfig
from normstream.tasks.augmentation import augment, cutmix, mixup, random_crop, random_flip
from normstream.tasks.rand_augment import OPERATIONS, rand_augment

ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "sharpness": ImageEnhance.Sharpness,
}
WITHOUT_STRENGTH = ("identity", "autocontrast", "equalize")


def pictures(batch: int = 6, channels: int = 3, side: int = 17) -> Tensor:
    """Smooth random images of whole levels, some dark, some flat in a channel."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(batch, channels, 5, 5, generator=generator)
    images = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear")
    images = 0.2 + 0.6 * images + 0.1 * torch.rand(images.shape, generator=generator)
    images[0, 0] = 0.3
    images[1] *= 0.4
    return (images * 255).round()


def by_pillow(levels: Tensor, operation) -> Tensor:
    def one(image: Tensor) -> Tensor:
        array = image.to(torch.uint8).permute(1, 2, 0).numpy()
        picture = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
        return torch.from_numpy(np.atleast_3d(np.asarray(operation(picture))).copy()).permute(2, 0, 1).float()

    return torch.stack([one(image) for image in levels])


def assert_levels(got: Tensor, wanted: Tensor, *, off_by_one: float = 0.0) -> None:
    """Equal, but for at most this part of the pixels, which may differ by one level."""
    difference = (got - wanted).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() <= off_by_one


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strength", [-1.0, -0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", ENHANCERS)
def test_enhancements_are_those_of_pillow(name: str, strength: float, channels: int):
    levels = pictures(channels=channels)
    got = OPERATIONS[name](levels, torch.full((len(levels),), strength))
    wanted = by_pillow(levels, lambda picture: ENHANCERS[name](picture).enhance(1 + 0.9 * strength))
    assert_levels(got, wanted, off_by_one=0.01)
    assert (got != levels).any() or (name == "color" and channels == 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "operation"), [("autocontrast", ImageOps.autocontrast), ("equalize", ImageOps.equalize)]
)
def test_histogram_operations_are_those_of_pillow(name: str, operation, channels: int):
    levels = pictures(channels=channels, side=40)
    got = OPERATIONS[name](levels, torch.ones(len(levels)))
    assert_levels(got, by_pillow(levels, operation), off_by_one=0.01 if name == "autocontrast" else 0.0)
    assert (got != levels).any()
    flat = torch.full((1, channels, 8, 8), 77.0)
    assert torch.equal(OPERATIONS[name](flat, torch.ones(1)), flat)


def test_posterize_and_solarize_are_those_of_pillow():
    levels = pictures()
    for strength, bits, threshold in ((0.5, 6, 128), (-1.0, 4, 0), (0.25, 7, 192)):
        signed = torch.full((len(levels),), strength)
        wanted = by_pillow(levels, lambda picture, bits=bits: ImageOps.posterize(picture, bits))
        assert torch.equal(OPERATIONS["posterize"](levels, signed), wanted)
        wanted = by_pillow(levels, lambda picture, threshold=threshold: ImageOps.solarize(picture, threshold))
        assert torch.equal(OPERATIONS["solarize"](levels, signed), wanted)


@pytest.mark.parametrize("strength", [-1.0, 0.37, 1.0])
def test_moves_are_those_of_pillow(strength: float):
    """Nearest pixels: at most a few lie on the border between two, where rounding decides."""
    levels, side = pictures(side=32), 32
    c = (side - 1) / 2
    shear, shift = 0.3 * strength, float(int(150 / 331 * strength * side))

    def affine(*m: float):
        """pillow counts from the corner of a pixel: its matrix acts on (x + 1/2, y + 1/2)."""
        a, b, d, e = m[:4]
        h = c + 0.5
        offset = (h - a * h - b * h + m[4], h - d * h - e * h + m[5])
        return lambda p: p.transform(p.size, Image.Transform.AFFINE, (a, b, offset[0], d, e, offset[1]))

    cases = {
        "rotate": lambda picture: picture.rotate(30 * strength),
        "shear_x": affine(1, shear, 0, 1, 0, 0),
        "shear_y": affine(1, 0, shear, 1, 0, 0),
        "translate_x": affine(1, 0, 0, 1, shift, 0),
        "translate_y": affine(1, 0, 0, 1, 0, shift),
    }
    for name, operation in cases.items():
        got = OPERATIONS[name](levels, torch.full((len(levels),), strength))
        same = (got == by_pillow(levels, operation)).all(1).float().mean()
        assert same >= (1 if name.startswith("translate") else 0.99), name
        assert (got != levels).any(), name


def test_every_operation_is_listed_once():
    assert list(OPERATIONS) == [
        *("identity", "autocontrast", "equalize", "rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
        *("brightness", "color", "contrast", "sharpness", "posterize", "solarize"),
    ]


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("autocontrast", "equalize")])
def test_strength_zero_changes_nothing(name: str):
    for channels in (1, 3):
        levels = pictures(channels=channels)
        assert torch.equal(OPERATIONS[name](levels, torch.zeros(len(levels))), levels)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_stay_images_one_by_one(name: str):
    """Levels stay whole and between 0 and 255, and an image does not depend on its neighbours in the batch."""
    levels, strength = pictures(), torch.tensor([1.0, -1.0, 0.7, -0.7, 0.2, 0.0])
    together = OPERATIONS[name](levels, strength)
    alone = torch.cat([OPERATIONS[name](levels[i : i + 1], strength[i : i + 1]) for i in range(6)])
    assert torch.equal(together, alone)
    assert torch.equal(together, together.round())
    assert together.min() >= 0
    assert together.max() <= 255


def test_rand_augment_is_drawn_for_each_image_and_repeatable():
    same = (pictures()[2:3] / 255).expand(64, -1, -1, -1)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(rand_augment(same, n_ops=1, magnitude=9))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    levels = (results[0] * 255).round()
    strengths = torch.tensor([0.9, -0.9])
    possible = [op(pictures()[2:3].expand(2, -1, -1, -1), strengths) for op in OPERATIONS.values()]
    found = {tuple(image.flatten().tolist()) for image in levels}
    assert found <= {tuple(image.flatten().tolist()) for pair in possible for image in pair}
    assert len(found) > 10


def test_no_operation_and_no_strength():
    images = torch.rand(4, 3, 9, 9)
    assert torch.equal(rand_augment(images, n_ops=0, magnitude=9), images)
    whole = pictures() / 255
    torch.manual_seed(0)
    moved = [(rand_augment(whole, n_ops=1, magnitude=0) != whole).flatten(1).any(1) for _ in range(20)]
    part = torch.stack(moved).float().mean()
    assert part < 0.3, "only autocontrast and equalize, two of fourteen, have no strength"


def test_mixup_is_a_convex_combination():
    images, labels = torch.rand(6, 1, 4, 4), torch.arange(6)
    torch.manual_seed(0)
    weights = []
    for _ in range(200):
        mixed = mixup(images, labels, alpha=0.8)
        wanted = mixed.weight * images + (1 - mixed.weight) * images[[5, 4, 3, 2, 1, 0]]
        torch.testing.assert_close(mixed.images_BCHW, wanted)
        assert mixed.others_B.tolist() == [5, 4, 3, 2, 1, 0]
        assert mixed.labels_B.tolist() == list(range(6))
        weights.append(mixed.weight)
    weights = torch.tensor(weights)
    assert abs(weights.mean() - 0.5) < 0.08
    assert abs(weights.var() - 1 / (4 * (2 * 0.8 + 1))) < 0.03, "the variance of Beta(a, a) is 1 / (4 (2 a + 1))"


def test_cutmix_weights_are_areas():
    images = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 3, 9, 12)
    torch.manual_seed(0)
    seen = set()
    for _ in range(100):
        mixed = cutmix(images, torch.tensor([3, 4]), alpha=1.0)
        pasted = mixed.images_BCHW[0, 0] == 1
        assert mixed.weight == pytest.approx(1 - pasted.float().mean().item(), abs=1e-6)
        assert torch.equal(mixed.images_BCHW[1], 1 - mixed.images_BCHW[0])
        assert mixed.others_B.tolist() == [4, 3]
        rows, columns = pasted.any(1), pasted.any(0)
        assert torch.equal(pasted, rows[:, None] & columns), "one box"
        seen.add(round(mixed.weight, 4))
    assert len(seen) > 20
    assert images[0].max() == 0, "the images given are left alone"


def test_crop_is_a_window_of_the_padded_image():
    images = torch.rand(40, 2, 5, 6) + 0.1
    torch.manual_seed(0)
    cropped = random_crop(images, padding=2)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    places = set()
    for image, window in zip(padded, cropped, strict=True):
        found = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(image[:, top : top + 5, left : left + 6], window)
        ]
        assert len(found) == 1
        places.add(found[0])
    assert len(places) > 10
    assert {top for top, _ in places} == {left for _, left in places} == set(range(5))


def test_flip_mirrors_about_half():
    images = torch.rand(200, 1, 3, 4)
    torch.manual_seed(0)
    flipped = random_flip(images)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert ((flipped == images).flatten(1).all(1) ^ mirrored).all()
    assert 70 < mirrored.sum() < 130


@pytest.mark.parametrize(
    ("config", "cuts"),
    [
        (AugmentationConfig(mixup=1.0), 0.0),
        (AugmentationConfig(cutmix=1.0), 1.0),
        (AugmentationConfig(mixup=1.0, cutmix=1.0), 0.5),
        (AugmentationConfig(mixup=1.0, cutmix=1.0, cutmix_probability=0.0), 0.0),
        (AugmentationConfig(mixup=1.0, cutmix=1.0, cutmix_probability=1.0), 1.0),
    ],
)
def test_switch_between_mixtures(config: AugmentationConfig, cuts: float):
    images, labels = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 1, 8, 8), torch.tensor([0, 1])
    torch.manual_seed(0)
    n_cuts = 0
    for _ in range(200):
        mixed = augment(images, labels, config)
        n_cuts += bool(((mixed.images_BCHW == 0) | (mixed.images_BCHW == 1)).all())
    assert abs(n_cuts / 200 - cuts) < 0.12


def test_everything_at_once_is_repeatable_and_off_by_default():
    images, labels = pictures() / 255, torch.arange(6)
    assert augment(images, labels, AugmentationConfig()).images_BCHW is images
    config = AugmentationConfig(crop_padding=2, flip=True, rand_ops=2, mixup=0.8, cutmix=1.0)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(augment(images, labels, config))
    assert torch.equal(results[0].images_BCHW, results[1].images_BCHW)
    assert results[0].weight == results[1].weight
    assert not torch.equal(results[0].images_BCHW, images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_padding": -1}, "crop_padding must be at least 0"),
        ({"mixup": -0.1}, "mixup must be at least 0"),
        ({"cutmix": float("inf")}, "cutmix must be at least 0"),
        ({"rand_magnitude": 11.0}, r"rand_magnitude must be in \[0, 10\]"),
        ({"cutmix_probability": 1.5}, "cutmix_probability must be in"),
    ],
)
def test_wrong_options(changes: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        AugmentationConfig(**changes)  # pyright: ignore[reportArgumentType]
