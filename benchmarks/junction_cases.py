"""One junction, by several means: what is timed, and on which tensors.

The junction stands in the middle of a row of 12 blocks, behind the attention. Its update, its streams and all
parameters want gradients; each of its outputs, the streams and z, receives one, as in the middle of a model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import Case
from benchmarks.traffic import Dtypes, Shape, shape_of
from normstream import placements
from normstream.junctions import Junction, State, set_backend

N_LAYERS = 12
AFTER_ATTENTION = 2 * (N_LAYERS // 2) + 1
PRECISIONS = {
    "fp32": Dtypes(torch.float32, torch.float32, torch.float32),
    "bf16": Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "mixed": Dtypes(torch.bfloat16, torch.float32, torch.bfloat16),
}
"""mixed is autocast to bfloat16: updates and z in bfloat16, streams in float32."""

Forward = Callable[[State, Tensor], tuple[State, Tensor]]


class Tensors(NamedTuple):
    """What goes into a junction."""

    update: Tensor
    state: State
    gradients: tuple[Tensor, ...]
    """Of the streams and, where z is a tensor of its own, of z."""

    def of(self, shape: Shape) -> "Tensors":
        """As many of these, drawn for two streams, as a junction has."""
        streams = shape.n_streams
        z_too = self.gradients[-1:] if shape.has_z else ()
        return Tensors(self.update, self.state[:streams], (*self.gradients[:streams], *z_too))


def junction(name: str, dim: int, device: torch.device) -> Junction:
    """A junction in the middle of a row; ``name`` is a placement, ``name/attention`` the junction before an attention.

    >>> junction("siamese", 8, torch.device("cpu")).read.norm_in is None
    False
    """
    placement, _, site = name.partition("/")
    row = placements.get(placement).junctions(dim, N_LAYERS)
    return row[AFTER_ATTENTION + (site == "attention")].to(device)


def tensors(dtypes: Dtypes, rows: int, dim: int, device: torch.device) -> Tensors:
    """Random tensors from a fixed seed, for two streams; all junctions of a comparison share them."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(dtype: torch.dtype, wants: bool = False) -> Tensor:
        drawn = torch.randn(1, rows, dim, device=device, generator=generator)
        return drawn.to(dtype).requires_grad_(wants)

    state = (draw(dtypes.stream, True), draw(dtypes.stream, True))
    gradients = (draw(dtypes.stream), draw(dtypes.stream), draw(dtypes.z))
    return Tensors(draw(dtypes.update, True), state, gradients)


def autocast(dtypes: Dtypes, device: torch.device) -> AbstractContextManager[object]:
    """The context of a precision's forward pass."""
    return nullcontext() if dtypes.z == dtypes.stream else torch.autocast(device.type, dtypes.z)


def by_backend(of: Junction, backend: str, dtypes: Dtypes) -> Forward:
    """The junction through one of normstream's backends; z in the dtype that the next matrix product reads.

    Under autocast the cast of z would otherwise be the next sublayer's, outside of what is timed.
    """
    set_backend(of, backend)  # pyright: ignore[reportArgumentType]
    has_z = shape_of(of).has_z

    def forward(state: State, update: Tensor) -> tuple[State, Tensor]:
        state, z = of(state, update)
        return state, z.to(dtypes.z) if has_z else z

    return forward


def by_inductor(of: Junction, dtypes: Dtypes) -> Forward:
    """The junction's plain formula, compiled by Inductor as one graph for these shapes."""
    return torch.compile(by_backend(of, "plain", dtypes), fullgraph=True, dynamic=False)


def by_liger(gain: nn.Parameter, eps: float) -> Forward:
    """Liger-Kernel's addition and RMSNorm in one kernel: Pre-Norm, one dtype.

    Raises:
        ImportError: where Liger-Kernel or Triton is not installed.
    """
    from liger_kernel.ops import LigerFusedAddRMSNormFunction  # pyright: ignore[reportMissingImports]

    def forward(state: State, update: Tensor) -> tuple[State, Tensor]:
        z, x = LigerFusedAddRMSNormFunction.apply(update, state[0], gain, eps)  # pyright: ignore[reportGeneralTypeIssues]
        return (x,), z

    return forward


def by_quack(gain: nn.Parameter, eps: float) -> Forward:
    """QuACK's RMSNorm with a residual: Pre-Norm, update and stream of any dtypes.

    Raises:
        ImportError: where QuACK is not installed.
    """
    from quack.rmsnorm import rmsnorm  # pyright: ignore[reportMissingImports]

    def forward(state: State, update: Tensor) -> tuple[State, Tensor]:
        z, x = rmsnorm(update, gain, residual=state[0], residual_dtype=state[0].dtype, eps=eps, prenorm=True)
        return (x,), z

    return forward


def case(forward: Forward, inputs: Tensors, parameters: Sequence[nn.Parameter], dtypes: Dtypes) -> Case:
    """Forward and backward of one junction; all gradients are computed, none is added to an old one."""
    kept: list[tuple[Tensor, ...]] = []
    leaves = (inputs.update, *inputs.state, *parameters)

    def run_forward() -> None:
        kept.append(outputs(forward, inputs, dtypes))

    def run_backward() -> None:
        torch.autograd.grad(kept.pop(), leaves, inputs.gradients)

    return {"forward": run_forward, "backward": run_backward}


def outputs(forward: Forward, inputs: Tensors, dtypes: Dtypes) -> tuple[Tensor, ...]:
    """The new streams and, where it is a tensor of its own, z."""
    with autocast(dtypes, inputs.update.device):
        streams, z = forward(inputs.state, inputs.update)
    return (*streams, z)[: len(inputs.gradients)]
