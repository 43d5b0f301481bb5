"""The operations as torch sees them: schema, shapes for tracing, dispatch."""

import itertools
from typing import Any

import pytest
import torch
from row_program import case_of
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from normstream.ops.form import DTYPES, Constants, Form, NormForm

RMS, LAYER, NO = NormForm(1), NormForm(2), NormForm()
OPS = torch.ops.normstream
UTILS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def forms() -> list[Form]:
    """One or two streams, first or not, with z or not, and every choice of norms that is a junction."""
    found = []
    for two, state, has_z in itertools.product((False, True), repeat=3):
        for out, x, y, at_z in itertools.product((NO, RMS, LAYER), repeat=4):
            nowhere = (y.kind and not (two and has_z)) or (at_z.kind and not has_z)
            if not nowhere and any(norm.kind for norm in (out, x, y, at_z)):
                found.append(Form(1 + two, state, has_z, norm_out=out, norm_x=x, norm_y=y, norm_in=at_z))
    return found


def arguments_of(form: Form, rows: int = 3, dim: int = 5, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Random arguments of ``junction`` with every gain and bias, and c where y is read."""
    stream = DTYPES[form.stream_dtype]
    parameters = [
        torch.randn(dim) if there else None for norm in form.norms for there in (norm.kind > 0, norm.kind == 2)
    ]
    parameters.append(torch.randn(dim) if form.norm_y.kind else None)
    x = torch.randn(rows, dim).to(stream) if form.has_state else None
    y = torch.randn(rows, dim).to(stream) if form.has_state and form.n_streams == 2 else None
    scale, read_scale = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.9, dtype=torch.float64)
    constants = list(Constants(1.3, 0.8, 0.1, 0.2, 0.3, 0.4))
    return [torch.randn(rows, dim).to(dtype), x, y, parameters, scale, read_scale, constants, form.encode()]


def backward_arguments_of(form: Form, arguments: list[Any], outputs: Any) -> list[Any]:
    """Arguments of ``junction_backward`` where a gradient arrives for every output."""
    x_out, y_out, z, raw_x, stats = outputs
    update, _, _, *rest = arguments
    incoming = [torch.randn_like(t) if t.ndim == 2 else None for t in (z, x_out, y_out)]
    kept = update if form.norm_out.kind else None, raw_x if form.norm_x.kind else x_out
    return [*incoming, *kept, y_out if form.norm_y.kind else None, stats, *rest, DTYPES.index(update.dtype)]


def alike(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device


@pytest.mark.parametrize(("dtype", "stream"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.float16, 2)], ids=str)
def test_shapes_for_tracing_are_the_real_ones(dtype: torch.dtype, stream: int) -> None:
    for form in forms():
        form = form._replace(stream_dtype=stream, z_dtype=1)
        arguments = arguments_of(form, dtype=dtype)
        outputs = OPS.junction(*arguments)
        backward = backward_arguments_of(form, arguments, outputs)
        gradients = OPS.junction_backward(*backward)
        with FakeTensorMode() as mode:
            fake = lambda values: tree_map_only(Tensor, mode.from_tensor, values)  # noqa: E731
            fake_outputs = OPS.junction(*fake(arguments))
            fake_gradients = OPS.junction_backward(*fake(backward))
        assert all(map(alike, outputs, fake_outputs)), form
        assert all(map(alike, gradients, fake_gradients)), form


CHECKED = {
    "pre": Form(norm_in=RMS),
    "peri, first": Form(has_state=False, norm_x=LAYER, norm_in=RMS),
    "olmo2": Form(has_z=False, norm_out=LAYER),
    "siamese": Form(2, norm_x=RMS, norm_y=LAYER, norm_in=RMS),
    "hybrid-pre": Form(2, norm_y=RMS),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's tracer hides its own warnings, which "error" undoes
@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str) -> None:
    """Nothing is written but the results, which share no memory; shapes and a traced, dynamic run agree."""
    form = CHECKED[name]
    arguments = arguments_of(form)
    outputs = OPS.junction(*arguments)
    torch.library.opcheck(OPS.junction.default, tuple(arguments), test_utils=UTILS)
    torch.library.opcheck(
        OPS.junction_backward.default, tuple(backward_arguments_of(form, arguments, outputs)), test_utils=UTILS
    )
    if form.has_z:
        _, y_out, z, raw_x, stats = outputs
        saved = raw_x if form.norm_x.kind else outputs[0], y_out if form.norm_y.kind else None, stats
        again = (*saved, arguments[3], *arguments[5:])
        torch.library.opcheck(OPS.junction_z.default, again, test_utils=UTILS)
        torch.testing.assert_close(OPS.junction_z(*again), z)


def test_meta_tensors_have_shapes_only() -> None:
    case = case_of("siamese", 2)
    streams, z = case.junction.to("meta")(tuple(s.to("meta") for s in case.state), case.update.to("meta"))
    assert all(t.is_meta and t.shape == case.update.shape for t in (*streams, z))
