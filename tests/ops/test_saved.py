"""What a junction keeps for its backward pass, counted in units of rows times width."""

from typing import Any

import pytest
import torch
from row_program import Case, case_of
from torch import Tensor

# By hand, for each kind of junction: tensors of the streams' dtype, and float32 numbers a row with RMSNorm.
# The update where it is normed; h where x is normed, else x'; y' where it is normed. 1 / rms; a LayerNorm's mean too.
KEPT = {
    ("pre", 1): (1, 1),
    ("layernorm_scaling", 3): (1, 1),
    ("post", 1): (1, 1),
    ("deepnorm(alpha=2.8,final_norm=true)", 4): (1, 2),
    ("keel(alpha=3,first_block=none)", 1): (1, 2),
    ("peri", 0): (1, 2),
    ("peri", 1): (2, 2),
    ("swin_v2(extra_norm_every=1)", 2): (2, 2),
    ("residual(scale=0.3)", 1): (1, 1),
    ("residual(input_norm=true,scale=0.3)", 1): (1, 2),
    ("siamese", 0): (2, 3),
    ("siamese", 1): (2, 3),
    ("siamese(input_norm=false)", 1): (2, 2),
    ("siamese_hybrid_pre", 1): (2, 3),
    ("siamese_hybrid_pre", 2): (2, 1),
}


def kept_by(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that autograd keeps, each memory once, without parameters and single numbers; and x', y', z."""
    given = [t.requires_grad_() for t in (case.update, *case.state)]
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.ndim and not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        streams, z = case.junction(tuple(given[1:]), given[0])
    return list(kept.values()), [*streams, z]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [{"kind": "rms"}, {"kind": "layer", "bias": True}], ids=["rms", "layer"])
@pytest.mark.parametrize("kind", KEPT, ids="{0[0]}[{0[1]}]".format)
def test_kept_bytes(kind: tuple[str, int], norm: dict[str, Any], dtype: torch.dtype) -> None:
    case = case_of(*kind, (4, 6, 32), dtype, dtype, **norm)
    kept, outputs = kept_by(case)
    units, numbers = KEPT[kind]
    numbers *= 2 if norm["kind"] == "layer" else 1
    rows = 4 * 6
    assert sum(t.untyped_storage().nbytes() for t in kept) == rows * (units * 32 * dtype.itemsize + numbers * 4)
    if outputs[-1] is not outputs[0]:
        assert outputs[-1].untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in kept}


def test_pre_norm_keeps_the_stream_itself() -> None:
    """Its unit is the memory of x', which the next junction needs anyway; SiameseNorm's second is that of y'."""
    kept, (x, _) = kept_by(case_of("pre", 1))
    assert x.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in kept}
    kept, (_, y, _) = kept_by(case_of("siamese", 2))
    assert y.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in kept}


def test_nothing_is_kept_without_gradients() -> None:
    case = case_of("siamese", 2)
    with torch.no_grad():
        kept, _ = kept_by(case)
    assert kept == []
