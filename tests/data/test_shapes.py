"""The generated shapes: counted by area, told apart by symmetry, the same by seed and index; and the other sources."""

import math

import numpy as np
import pytest

from normstream.data.diffusion_config import DiffusionDataConfig
from normstream.data.diffusion_images import load_diffusion_images
from normstream.data.shapes import SHAPES, draw_shapes


def test_an_image_depends_on_seed_and_index_alone():
    images, labels = draw_shapes(0, 20, seed=3)
    later, later_labels = draw_shapes(13, 7, seed=3)
    assert (later == images[13:]).all()
    assert later_labels.tolist() == labels[13:].tolist() == [i % 6 for i in range(13, 20)]
    assert (draw_shapes(0, 20, seed=4)[0] != images).any(axis=(1, 2, 3)).all()
    assert len(np.unique(images.reshape(20, -1), axis=0)) == 20


# area of each shape in squares of its radius
AREAS = {
    "circle": math.pi,
    "square": 1.7**2,
    "triangle": 1.8 * 2 / 2,
    "cross": 2 * 2 * 0.66 - 0.66**2,
    "ring": 0.7 * math.pi,
    "diamond": 2 * 1.1**2,
}


@pytest.mark.parametrize("kind", AREAS)
def test_the_area_of_a_shape(kind):
    """By counting places on a grid of 1000 x 1000 that reaches to 1.2 radii."""
    places = (np.arange(1000) + 0.5) / 1000 * 2.4 - 1.2
    inside = SHAPES[kind](places[None, :], places[:, None])
    assert inside.mean() * 2.4**2 == pytest.approx(AREAS[kind], rel=0.01)


def test_images_are_one_bright_shape_on_dark_grey():
    """A corner that is no part of the shape is grey and darker than 31 %; the brightest channel is full somewhere."""
    images, labels = draw_shapes(0, 600, size=32)
    assert images.dtype == np.uint8
    assert images.shape == (600, 3, 32, 32)
    assert np.bincount(labels).tolist() == [100] * 6
    corners = np.sort(images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]].max(1), axis=1)[:, 1]
    assert corners.max() <= round(0.3 * 255)
    bright = images.max(1).reshape(600, -1).max(1)
    assert bright.min() > 200
    covered = (images.max(1) > 128).reshape(600, -1).mean(1)
    assert 0.05 < covered.min() < covered.max() < 0.6


def test_the_split():
    data = load_diffusion_images(DiffusionDataConfig(max_images=30))
    images, labels = draw_shapes(0, 60)
    assert (data.train.pixels == images[:30]).all()
    found = {
        pixels.tobytes(): label for pixels, label in zip(data.validation.pixels, data.validation.labels, strict=True)
    }
    assert found == {pixels.tobytes(): label for pixels, label in zip(images[30:], labels[30:], strict=True)}
    assert data.classes == ("circle", "square", "triangle", "cross", "ring", "diamond")
    assert data.corpus_hash == load_diffusion_images(DiffusionDataConfig(max_images=30)).corpus_hash
    assert data.corpus_hash != load_diffusion_images(DiffusionDataConfig(max_images=30, seed=1)).corpus_hash


def test_every_fourth_held_out_shape_is_of_any_class():
    """Evaluations spread over the split this way; in drawing order these would be of three classes."""
    labels = load_diffusion_images(DiffusionDataConfig()).validation.labels
    assert np.bincount(labels[::4], minlength=6).min() > 512 / 6 * 0.7


def test_other_sources_are_those_of_the_task_vision():
    config = DiffusionDataConfig(source="digits", max_images=50)
    data = load_diffusion_images(config)
    assert data.config is config
    assert (data.image_size, data.channels, len(data.classes)) == (8, 1, 10)
    with pytest.raises(ValueError, match="did you mean 'shapes'"):
        load_diffusion_images(DiffusionDataConfig(source="shape"))


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"shown": 0}, "shown must be at least 1"),
        ({"channels": 1}, "shapes have 3 channels"),
        ({"channels": 2, "source": "digits"}, "channels must be 1"),
        ({"seed": -1}, "seed must not be negative"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
    ],
)
def test_wrong_settings(values, message):
    with pytest.raises(ValueError, match=message):
        DiffusionDataConfig(**values)


def test_too_small_shapes():
    with pytest.raises(ValueError, match="at least 8 x 8"):
        draw_shapes(0, 1, size=4)
