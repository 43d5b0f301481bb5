"""Every form that the operation can have, also those that no placement needs yet, against the formula in float64."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from row_program import Case, derive, error, row_program
from torch import Tensor, nn

from normstream.norms import LayerNorm, RMSNorm
from normstream.ops import JoinPart, ReadPart, fused

SHAPE = (7, 21)
SLOTS = ("norm_out", "norm_x", "norm_y", "norm_in")


class AnyJunction(nn.Module):
    """A junction whose norms are given, with a number of its own at every place where the formula has one."""

    norm_out: Any
    norm_x: Any
    norm_y: Any
    norm_in: Any

    def __init__(self, norms: tuple[str, ...], two_streams: bool, has_z: bool, has_state: bool) -> None:
        super().__init__()
        for k, (slot, kind) in enumerate(zip(SLOTS, norms, strict=True)):
            norm: Any = None
            if kind:
                norm = (RMSNorm if kind == "rms" else LayerNorm)(SHAPE[1], eps=0.1 * (k + 1))
            setattr(self, slot, norm)
        self.c = nn.Parameter(torch.ones(SHAPE[1])) if self.norm_y is not None else None
        with torch.no_grad():
            for p in self.parameters():
                p += 0.3 * torch.randn(p.shape)
        self.second, self.has_z, self.starts = 0.7 if two_streams else None, has_z, not has_state

    def parts(self) -> tuple[JoinPart, ReadPart]:
        number = torch.tensor([0.6, 1.2], dtype=torch.float64)
        join = JoinPart(self.norm_out, self.norm_x, 1.4, number[0], self.second, self.starts)
        return join, ReadPart(self.norm_in, self.norm_y, self.c, number[1], self.has_z)

    def forward(self, state: tuple[Tensor, ...], update: Tensor) -> Any:
        result = fused(*self.parts(), state, update, "cpp")
        assert result is not None
        return result


def formula(junction: Any, state: tuple[Tensor, ...], update: Tensor) -> list[Tensor]:
    join, read = junction.parts()
    halves = SimpleNamespace(join=SimpleNamespace(part=lambda: join), read=SimpleNamespace(part=lambda: read))
    return row_program(halves, state, update)


@pytest.mark.parametrize("has_state", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("n_streams", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_form(dtype: torch.dtype, n_streams: int, has_state: bool) -> None:
    bound = 2e-6 if dtype == torch.float32 else 6e-3
    for has_z, norms in itertools.product((True, False), itertools.product(("", "rms", "layer"), repeat=4)):
        if not any(norms) or (norms[2] and (n_streams == 1 or not has_z)) or (norms[3] and not has_z):
            continue
        junction = AnyJunction(norms, n_streams == 2, has_z, has_state)
        state = tuple(torch.randn(SHAPE).to(dtype) for _ in range(n_streams * has_state))
        case = Case(str(norms), junction, state, torch.randn(SHAPE).to(dtype))  # pyright: ignore[reportArgumentType]
        exact: Any = case._replace(
            junction=copy.deepcopy(junction).double(),
            state=tuple(s.double() for s in state),
            update=case.update.double(),
        )
        incoming = [torch.randn(SHAPE).to(dtype) for _ in range(n_streams + has_z)]
        outputs, gradients = derive(case, incoming)
        wanted, wanted_gradients = derive(exact, incoming, formula)
        for ours, true in zip((*outputs, *gradients), (*wanted, *wanted_gradients), strict=True):
            assert error(ours, true) <= bound, (norms, has_z)
