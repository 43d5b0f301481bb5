"""Fused junctions inside ``torch.compile``: one graph, compiled once for all depths, the same numbers.

``test_compile.py`` runs this file in a process of its own, without the type checks of a test run, which torch's tracer
cannot follow.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from row_program import case_of, derive, error, in_float64, incoming_of, row_program
from torch import Tensor
from torch._guards import CompileContext
from torch.utils.checkpoint import checkpoint

from normstream.init import initialize
from normstream.junctions import set_backend
from normstream.models import DecoderConfig, DecoderLM
from normstream.ops import calls

pytestmark = pytest.mark.filterwarnings("ignore")  # the tracer hides its own warnings, which "error" undoes


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiler:
    """A backend that knows how often it was needed; a graph that is traced twice before it runs counts once."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.backend: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
        self.compiled: set[str] = set()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.compiled.add(str(CompileContext.current_compile_id()))
        return self.backend(*arguments, **options)


def decoder(placement: str, n_layers: int, backend: Any) -> DecoderLM:
    config = DecoderConfig(placement=placement, vocab_size=11, dim=16, n_layers=n_layers, n_heads=2, ffn_dim=16)
    model = DecoderLM(config)
    initialize(model, seed=0)
    set_backend(model, backend)
    return model


def step(model: DecoderLM) -> dict[str, Tensor]:
    """Logits and all gradients of one step."""
    model.zero_grad()
    logits = model(torch.arange(12).view(2, 6) % 11)
    logits.logsumexp(-1).square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def check_layers(placement: str, n_layers: int, backend: str, n_graphs: int, compiler: Compiler) -> dict[str, int]:
    """Compares compiled layers with eager ones; returns the calls that the compiled step made."""
    model = decoder(placement, n_layers, backend)
    eager = step(model)
    layer: Any
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=compiler, fullgraph=True)
    step(model)
    before = calls.copy()
    compiled = step(model)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(compiler.compiled) == n_graphs
    assert compiled.keys() == eager.keys()
    for name, tensor in compiled.items():
        torch.testing.assert_close(tensor, eager[name], rtol=1e-5, atol=1e-6, msg=name)
    return dict(calls - before)


# With auto, what has one stream is left to the compiler on a CPU; the first junction stands before the layers.
LAYERS = [
    ("siamese", "auto", 1, 49),
    ("layernorm_scaling", "auto", 2, 0),  # the last layer ends with the final norm
    ("layernorm_scaling", "cpp", 2, 48),
    ("keel", "cpp", 3, 48),  # the first block is an exception, and there is no final norm
    ("pre", "cpp", 1, 48),
]


@pytest.mark.parametrize(("placement", "backend", "n_graphs", "n_calls"), LAYERS, ids=lambda x: str(x))
def test_twenty_four_layers_are_compiled_once(placement: str, backend: str, n_graphs: int, n_calls: int) -> None:
    """No graph break, and no layer compiled anew because its depth scale is another number."""
    done = check_layers(placement, 24, backend, n_graphs, Compiler())
    assert done == ({"cpp junction": n_calls, "cpp junction_backward": n_calls} if n_calls else {})


def test_inductor() -> None:
    done = check_layers("siamese", 2, "auto", 1, Compiler("inductor"))
    assert done == {"cpp junction": 5, "cpp junction_backward": 5}


@pytest.mark.parametrize("kind", [("siamese", 2), ("siamese_hybrid_pre", 2), ("peri", 1), ("pre", 1)], ids=str)
def test_a_junction_for_any_length(kind: tuple[str, int]) -> None:
    """Values and gradients against float64; the length is no constant of the code."""
    compiler = Compiler()
    case = case_of(*kind, (1, 3, 32), kind="layer", bias=True)
    set_backend(case.junction, "cpp")
    run = torch.compile(case.junction, backend=compiler, fullgraph=True, dynamic=True)
    for shape in ((1, 3, 32), (2, 5, 32), (4, 7, 32)):
        case = case._replace(state=tuple(torch.randn(shape) for _ in case.state), update=torch.randn(shape))
        incoming = incoming_of(case)
        before = calls.copy()
        ours = derive(case, incoming, lambda _, state, update: [*run(state, update)[0], run(state, update)[1]])
        assert calls - before == {"cpp junction": 2, "cpp junction_backward": 2 - (len(incoming) < 2)}
        wanted = derive(in_float64(case), incoming, row_program)
        for a, b in zip((*ours[0], *ours[1]), (*wanted[0], *wanted[1]), strict=True):
            assert error(a, b) <= 2e-6
    assert len(compiler.compiled) <= 2  # a batch of one may be an exception


def test_recomputed_activations() -> None:
    """With activation checkpointing around a compiled layer the gradients are the eager ones."""
    model = decoder("siamese", 2, "auto")
    eager = step(model)
    layer: Any
    for layer in model.layers:
        compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        layer.forward = partial(checkpoint, compiled, use_reentrant=False)
    before = calls.copy()
    again = step(model)
    assert calls - before == {"cpp junction": 9, "cpp junction_backward": 5}
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, eager[name], rtol=1e-5, atol=1e-6, msg=name)


def test_autocast() -> None:
    case = case_of("siamese", 2, (2, 3, 32), torch.bfloat16)
    run = torch.compile(case.junction, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (streams, z), (wanted_streams, wanted_z) = run(case.state, case.update), case.junction(case.state, case.update)
    assert z.dtype == torch.bfloat16
    assert all(map(torch.equal, (*streams, z), (*wanted_streams, wanted_z)))


def test_the_numbers_of_field_reports() -> None:
    """Variance of a row with a large mean, tracel-ai/burn#5607; a float32 stream, NVIDIA/Megatron-LM#3504."""
    case = case_of("siamese(input_norm=false)", 1, (1, 1, 16), torch.bfloat16, kind="layer", bias=True)
    norm: Any = case.junction.read.norm_y
    norm.reset_parameters()
    norm.eps = 1e-5
    run = torch.compile(case.junction, backend="aot_eager", fullgraph=True)
    row = 4096 + torch.arange(16.0).view(1, 1, 16) * 2**-8
    (x, _), z = run((case.state[0], row), torch.zeros(1, 1, 16, dtype=torch.bfloat16))
    assert (z - x)[0, 0, 0].item() == pytest.approx(-1.6024558, abs=1e-4)
    y = torch.full((1, 1, 16), 256.0)
    for _ in range(100):
        (_, y), _ = run((case.state[0], y), torch.full((1, 1, 16), 0.5, dtype=torch.bfloat16))
        assert y.dtype == torch.float32
    assert torch.equal(y, torch.full((1, 1, 16), 306.0))
