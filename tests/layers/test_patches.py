"""Patches against torch's unfold and convolution, and the fixed positions against diffusers'."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_2d_sincos_pos_embed

from normstream.layers.patches import PatchEmbedding, patchify, sincos_positions, unpatchify

SHAPES = [(2, 3, 8, 8, 2), (1, 1, 6, 12, 3), (2, 4, 5, 5, 5), (1, 2, 3, 4, 1)]


@pytest.mark.parametrize(("batch", "channels", "height", "width", "patch"), SHAPES)
def test_patchify_is_unfold(batch: int, channels: int, height: int, width: int, patch: int):
    images = torch.randn(batch, channels, height, width, dtype=torch.float64)
    unfolded = F.unfold(images, patch, stride=patch)
    patches = patchify(images, patch)
    assert torch.equal(patches, unfolded.transpose(1, 2))
    assert torch.equal(unpatchify(patches, patch, width), images)
    assert torch.equal(F.fold(patches.transpose(1, 2), (height, width), patch, stride=patch), images)


@pytest.mark.parametrize(("batch", "channels", "height", "width", "patch"), SHAPES)
def test_embedding_is_a_convolution(batch: int, channels: int, height: int, width: int, patch: int):
    images = torch.randn(batch, channels, height, width, dtype=torch.float64, requires_grad=True)
    embedding = PatchEmbedding(7, channels=channels, patch_size=patch).double()
    weight = embedding.projection.weight.view(7, channels, patch, patch)
    wanted = F.conv2d(images, weight, embedding.projection.bias, stride=patch).flatten(2).transpose(1, 2)
    got = embedding(images)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    pull = torch.randn_like(got)
    gradients = [torch.autograd.grad(out, images, pull, retain_graph=True)[0] for out in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dim", "grid"), [(8, 3), (64, 4), (384, 16)])
def test_positions_are_those_of_diffusers(dim: int, grid: int):
    wanted = torch.as_tensor(get_2d_sincos_pos_embed(dim, grid, base_size=grid, output_type="pt"))
    got = sincos_positions(dim, grid, grid, like=torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(got, wanted.double(), rtol=0, atol=1e-10)
    single = sincos_positions(dim, grid, grid, like=torch.zeros(1))
    torch.testing.assert_close(single.double(), got, rtol=0, atol=5e-6)


def test_positions_of_a_grid_that_is_no_square():
    got = sincos_positions(8, rows=2, columns=3, like=torch.zeros(1))
    square = sincos_positions(8, rows=3, columns=3, like=torch.zeros(1))
    assert torch.equal(got, square[:6])


@pytest.mark.parametrize(("height", "width"), [(9, 8), (8, 9)])
def test_images_that_do_not_divide(height: int, width: int):
    with pytest.raises(ValueError, match=rf"{height} x {width} pixels do not divide into patches of 2 x 2; resize"):
        patchify(torch.zeros(1, 3, height, width), 2)


def test_patches_that_make_no_image():
    for size, patch, width in ((7, 2, 4), (8, 2, 3), (8, 2, 8)):
        with pytest.raises(ValueError, match="are no images of width"):
            unpatchify(torch.zeros(1, 6, size), patch, width)


def test_width_that_has_no_positions():
    with pytest.raises(ValueError, match="divisible by 4, got 6"):
        sincos_positions(6, 2, 2, like=torch.zeros(1))
