"""Images as rows of tokens: square patches, their embedding, their positions on the grid.

Shape suffixes: B batch, C channels, H height, W width, P side of a patch, N patches (row by row), K = C P P, D width.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normstream.norms import precise_dtype


def patchify(images_BCHW: Float[Tensor, "B C H W"], patch_size: int) -> Float[Tensor, "B N K"]:
    """Cuts images into square patches: those of the first row from left to right, then the next row.

    The K numbers of a patch are in the order of a convolution's weight: channel, row, column.

    Raises ValueError if height or width is not divisible by ``patch_size``.

    >>> patchify(torch.arange(8.0).view(1, 1, 2, 4), 2).tolist()
    [[[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]]
    """
    batch, channels, height, width = images_BCHW.shape
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"images of {height} x {width} pixels do not divide into patches of {patch_size} x {patch_size}; "
            "resize them or change patch_size"
        )
    grid = images_BCHW.reshape(
        batch, channels, height // patch_size, patch_size, width // patch_size, patch_size
    )  # B, C, rows, P, columns, P
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(patches_BNK: Float[Tensor, "B N K"], patch_size: int, width: int) -> Float[Tensor, "B C H W"]:
    """The images that ``patchify`` cuts into these patches.

    Args:
        patches_BNK: the patches.
        patch_size: side P of a patch.
        width: of the images, in pixels.

    Raises ValueError if the patches do not make up rows of this width, or K is no multiple of P P.

    >>> image = torch.arange(8.0).view(1, 1, 2, 4)
    >>> torch.equal(unpatchify(patchify(image, 2), 2, width=4), image)
    True
    """
    batch, n_patches, size = patches_BNK.shape
    columns = width // patch_size
    if size % patch_size**2 or width % patch_size or n_patches % columns:
        raise ValueError(
            f"{n_patches} patches of {size} numbers are no images of width {width} in patches of {patch_size} x "
            f"{patch_size}; give the patch_size and the width that they were made with"
        )
    grid = patches_BNK.reshape(batch, n_patches // columns, columns, -1, patch_size, patch_size)
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


class PatchEmbedding(nn.Module):
    """``e = W p + b`` for each patch p of an image: a convolution whose stride is its kernel's size.

    ``projection.weight`` (D, K) is the weight (D, C, P, P) of that convolution with its last axes flattened.

    Args:
        dim: width D of an embedding.
        channels: C.
        patch_size: P.
        bias: whether there is a b.

    Shape: ``(B, C, H, W)`` to ``(B, N, D)``. Source: Dosovitskiy et al. 2020, arXiv 2010.11929.

    >>> PatchEmbedding(8, channels=3, patch_size=2)(torch.zeros(1, 3, 4, 6)).shape
    torch.Size([1, 6, 8])
    """

    branch_outputs = ("projection",)
    """Matrices that write to the residual stream."""

    def __init__(self, dim: int, *, channels: int, patch_size: int, bias: bool = True) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Linear(channels * patch_size**2, dim, bias=bias)

    def forward(self, images_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        return self.projection(patchify(images_BCHW, self.patch_size))


def sincos_positions(dim: int, rows: int, columns: int, like: Tensor) -> Float[Tensor, "N D"]:
    """Fixed positions of the patches of a grid: sines and cosines of column and of row at D / 4 frequencies.

    The patch at row r and column c has ``[sin(c w), cos(c w), sin(r w), cos(r w)]`` with
    ``w_j = 10000^(-j / (D / 4))``.

    Args:
        dim: width D.
        rows, columns: of the grid.
        like: a tensor of the device and dtype of the result; the angles are in float32, or float64 for a float64 one.

    Raises ValueError unless D is divisible by 4.

    Source: the two-dimensional table of MAE and DiT, facebookresearch/mae:util/pos_embed.py.

    >>> sincos_positions(4, rows=1, columns=2, like=torch.zeros(1))
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0000, 1.0000]])
    """
    if dim % 4:
        raise ValueError(f"sincos positions need a dim divisible by 4, got {dim}; change it or take learned positions")
    high, device = precise_dtype(like), like.device
    frequencies = 10_000.0 ** (-torch.arange(dim // 4, dtype=high, device=device) / (dim // 4))
    down, right = torch.meshgrid(
        torch.arange(rows, dtype=high, device=device), torch.arange(columns, dtype=high, device=device), indexing="ij"
    )
    angles = [place.flatten()[:, None] * frequencies for place in (right, down)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1).to(like.dtype)
