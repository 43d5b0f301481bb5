"""What a fused junction computes: which of its four norms there are, with which conventions, and in which dtypes.

Every row (token) by itself, o being the update:

    u  = N_out(o)                               or o
    h  = alpha x + scale u                      alone u, without a factor, where there is one stream; no x at first
    x' = N_x(h)                                 or h
    y' = y + second u                           with two streams; no y at first
    w  = c * x' + N_y(y')                       or x'
    z  = read_scale N_in(w)                     or read_scale w

One formula with parts left out is Pre-Norm (N_in), Post-Norm (N_x), DeepNorm and Keel (alpha), Peri-LN (N_out, N_in),
OLMo 2 (N_out), LayerNorm Scaling (read_scale), ResiDual (second) and SiameseNorm (N_x, N_y, N_in).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""A dtype is written as its place in this list."""
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES[:3])}
"""The dtypes that fused junctions know, and their places."""
MOST_COLUMNS_IN_TRITON = 16_384
"""Wider rows do not fit into the registers of one program."""


class NormForm(NamedTuple):
    """Conventions of one norm, without its numbers; see ``normstream.norms`` for what they mean.

    >>> NormForm(kind=1).encode()
    1
    """

    kind: int = 0
    """0 no norm, 1 RMSNorm, 2 LayerNorm."""
    zero_centered: bool = False
    """Whether the gain is 1 + w."""
    round_normalized: int = 0
    """Dtype that the normalized row is rounded to before the gain; 0, float32, rounds nothing."""
    round_product: int = 0
    """Dtype that the product with the gain is rounded to before the bias."""

    def encode(self) -> int:
        """As one number: kind + 4 zero_centered + 8 round_normalized + 32 round_product."""
        return self.kind | self.zero_centered << 2 | self.round_normalized << 3 | self.round_product << 5

    @staticmethod
    def decode(code: int) -> "NormForm":
        """What ``encode`` wrote.

        >>> NormForm.decode(NormForm(2, True, 1, 2).encode())
        NormForm(kind=2, zero_centered=True, round_normalized=1, round_product=2)
        """
        return NormForm(code & 3, bool(code >> 2 & 1), code >> 3 & 3, code >> 5 & 3)


class Form(NamedTuple):
    """What a junction computes, without its numbers.

    >>> Form(norm_in=NormForm(kind=1)).encode()
    [1, 1, 1, 0, 0, 0, 0, 0, 1]
    >>> Form.decode([2, 1, 1, 1, 0, 0, 1, 1, 1]).norm_y.kind
    1
    """

    n_streams: int = 1
    """1 or 2."""
    has_state: bool = True
    """False at the first junction, where the streams start from the update."""
    has_z: bool = True
    """False where the sublayer reads the stream x' itself."""
    stream_dtype: int = 0
    """Dtype of the streams."""
    z_dtype: int = 0
    """Dtype of z: that of the streams, or autocast's."""
    norm_out: NormForm = NormForm()
    norm_x: NormForm = NormForm()
    norm_y: NormForm = NormForm()
    norm_in: NormForm = NormForm()

    def encode(self) -> list[int]:
        """As a list of integers, which a registered operation can take."""
        return [*map(int, self[:5]), *(norm.encode() for norm in self.norms)]

    @staticmethod
    def decode(code: Sequence[int]) -> "Form":
        """What ``encode`` wrote."""
        return Form(code[0], bool(code[1]), bool(code[2]), code[3], code[4], *map(NormForm.decode, code[5:]))

    @property
    def norms(self) -> tuple[NormForm, NormForm, NormForm, NormForm]:
        """The norms in the order of the computation."""
        return self.norm_out, self.norm_x, self.norm_y, self.norm_in

    @property
    def n_statistics(self) -> int:
        """Numbers a row that backward needs: 1 / rms of an RMSNorm, mean and 1 / deviation of a LayerNorm."""
        return sum(norm.kind for norm in self.norms)

    def shares_gradient(self, alpha: float, update_dtype: int) -> bool:
        """Whether the update and x receive the very same gradient, so that it is written once."""
        alone = self.n_streams == 1 and self.has_state and self.norm_out.kind == 0
        return alone and alpha == 1 and update_dtype == self.stream_dtype


class Constants(NamedTuple):
    """The numbers of a junction that do not change with depth, in the order in which an operation takes them.

    >>> list(Constants(alpha=2.0))
    [2.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """

    alpha: float = 1.0
    """Factor of the stream x."""
    second: float = 1.0
    """Factor of the second stream's update."""
    eps_out: float = 0.0
    eps_x: float = 0.0
    eps_y: float = 0.0
    eps_in: float = 0.0


def empty_outputs(update: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for x', y', z, h and the statistics of a forward pass; what the form does not have is of shape (0,).

    >>> [tuple(t.shape) for t in empty_outputs(torch.ones(2, 3), Form(norm_in=NormForm(kind=1)))]
    [(2, 3), (0,), (2, 3), (0,), (2, 1)]
    """
    stream, z_dtype, none = DTYPES[form.stream_dtype], DTYPES[form.z_dtype], (0,)
    return (
        update.new_empty(update.shape, dtype=stream),
        update.new_empty(update.shape if form.n_streams == 2 else none, dtype=stream),
        update.new_empty(update.shape if form.has_z else none, dtype=z_dtype),
        update.new_empty(update.shape if form.norm_x.kind else none, dtype=stream),
        update.new_empty((update.shape[0], form.n_statistics), dtype=torch.float32),
    )


def empty_gradients(
    saved_x: Tensor,
    parameters: Sequence[Tensor | None],
    constants: Sequence[float],
    form: Form,
    update_dtype: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the gradients of the update, of x, of y and of the parameters, (n, dim); see ``shares_gradient``."""
    shape, none = saved_x.shape, (0,)
    shared = form.shares_gradient(constants[0], update_dtype)
    return (
        saved_x.new_empty(none if shared else shape, dtype=DTYPES[update_dtype]),
        saved_x.new_empty(shape if form.has_state else none),
        saved_x.new_empty(shape if form.has_state and form.n_streams == 2 else none),
        saved_x.new_empty((sum(p is not None for p in parameters), shape[1]), dtype=torch.float32),
    )
