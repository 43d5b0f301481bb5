"""What the benchmarks count, fit and compare, against known answers."""

import doctest
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.harness import CpuClock, divided, interleave, quartiles
from benchmarks.memory import kept_tensors
from benchmarks.official_block import OfficialSiamese
from benchmarks.results import Result, Target
from benchmarks.shapes import SHAPES, ModelShape
from benchmarks.traffic import Dtypes, shape_of
from benchmarks.training_step import Step, batches
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import junction_cases, junctions, models, scaling, step
from normstream import DecoderLM, initialize
from normstream.ops import status

MODULES = (
    "harness",
    "machine",
    "memory",
    "models",
    "page",
    "plots",
    "results",
    "scaling",
    "shapes",
    "tables",
    "traffic",
)
MODULES += ("junction_cases", "training_step")
CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
needs_compiler = pytest.mark.skipif("compiled" not in status()["cpp"], reason="no C++ compiler")


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"benchmarks.{name}"), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted > 0


# Numbers


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0, 2.0, 3.0, 9.0]])
def test_quartiles_are_those_of_numpy(values: list[float]) -> None:
    assert quartiles(values) == pytest.approx(tuple(np.percentile(values, [25, 50, 75])))


def test_an_exact_power_is_found() -> None:
    xs = [256, 512, 1024, 4096]
    found = scaling.fit(xs, [0.003 * x**1.5 for x in xs])
    assert found == pytest.approx((1.5, 0.003, 0.0, 1.5), abs=1e-6)


def test_a_disturbed_power_is_found_with_its_disturbance() -> None:
    """Errors of +d, -d, -d, +d at equal distances have no part along a line: the slope stays, the residual is d."""
    d, xs = 0.1, [1, 2, 4, 8]
    ys = [7 * x**2 * math.exp(error) for x, error in zip(xs, (d, -d, -d, d), strict=True)]
    found = scaling.fit(xs, ys)
    assert found == pytest.approx((2.0, 7.0, d, 2 + 2 * d / math.log(2)), abs=1e-6)


def test_a_slow_round_leaves_ratios_alone() -> None:
    """A clock that runs three times as slowly every round; the second case takes twice the time of the first."""

    class Clock:
        name = "made up"
        n_calls = 0

        def __call__(self, phases: Sequence[Callable[[], Any]]) -> list[float]:
            self.n_calls += 1
            return [phase() * 3 ** ((self.n_calls - 1) // 2) for phase in phases]

    cases = {"one": {"a": lambda: 1.0, "b": lambda: 10.0}, "two": {"a": lambda: 2.0, "b": lambda: 20.0}}
    seconds = interleave(cases, Clock(), rounds=3, warm_up=0)
    for phase in ("a", "b"):
        assert divided(seconds["two"][phase], seconds["one"][phase]) == [2.0] * 3
    assert seconds["one"]["a"] == [1.0, 3.0, 9.0]


def test_rounds_are_in_another_order_each_time() -> None:
    order: list[str] = []
    cases = {name: {"run": lambda name=name: order.append(name)} for name in "abcd"}
    interleave(cases, CpuClock("wall"), rounds=4, warm_up=0)
    rounds = ["".join(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert all(sorted(found) == list("abcd") for found in rounds)
    assert len(set(rounds)) > 2


@pytest.mark.parametrize(
    ("values", "at_least", "verdict"),
    [
        ((0.5, 0.6, 0.7), True, "reached"),
        ((0.5, 0.59, 0.7), True, "missed"),
        ((0.5, 0.6, 0.9), False, "reached"),
        ((0.5, 0.61, 0.7), False, "missed"),
        ((), False, "not measured"),
    ],
)
def test_the_median_decides_and_nothing_is_rounded(values: tuple[float, ...], at_least: bool, verdict: str) -> None:
    assert Target("x", 0.6, at_least, values).verdict == verdict


# Bytes

HALF, FULL = torch.bfloat16, torch.float32
UNITS = {
    "pre": (4, 4),
    "post": (4, 3),
    "peri": (4, 6),
    "deepnorm": (4, 4),
    "keel": (5, 5),
    "residual": (6, 5),
    "siamese": (7, 8),
    "siamese_hybrid_pre": (7, 8),
    "siamese_hybrid_pre/attention": (6, 8),
}
"""Counted by hand from the equations, as in the table of ``benchmarks/traffic.py``."""


@pytest.mark.parametrize("name", UNITS)
def test_units_moved(name: str) -> None:
    shape = shape_of(junction_cases.junction(name, 8, CPU))
    assert (shape.forward.units, shape.backward(shared=True).units) == UNITS[name]
    assert set(UNITS) == set(junctions.PLACEMENTS)


def test_bytes_moved_in_mixed_precision() -> None:
    """Siamese, per element: o 2, x y 8, x' y' and the raw sum 12, z 2; back: dz 2, four streams 16, dx dy 8, do 2."""
    shape = shape_of(junction_cases.junction("siamese", 8, CPU))
    mixed = Dtypes(update=HALF, stream=FULL, z=HALF)
    assert shape.forward.nbytes(mixed, 1000) == 24_000
    assert shape.backward(shared=False).nbytes(mixed, 1000) == 28_000
    one_stream = shape_of(junction_cases.junction("pre", 8, CPU))
    assert one_stream.backward(shared=False).nbytes(mixed, 1000) == (2 + 4 + 4 + 4 + 2) * 1000
    assert one_stream.backward(shared=True).nbytes(Dtypes(FULL, FULL, FULL), 1000) == 16_000


@needs_compiler
@pytest.mark.parametrize(("name", "units", "norms"), [("pre", 1, 1), ("siamese", 2, 3), ("peri", 2, 2), ("post", 1, 1)])
@pytest.mark.parametrize("precision", junction_cases.PRECISIONS)
def test_a_fused_junction_keeps_the_least(name: str, units: int, norms: int, precision: str) -> None:
    rows, dim = 48, 32
    comparison = junctions.Comparison(rows, dim, precision, CPU)
    inputs = junction_cases.tensors(comparison.dtypes, rows, dim, CPU)
    variant = junctions.build(name, "ours", comparison, inputs, Result("x", CPU, {}))
    assert variant is not None
    found = junctions.kept(variant, comparison)
    sizes = [comparison.dtypes.stream.itemsize] * units
    if name == "peri":
        sizes[0] = comparison.dtypes.update.itemsize  # the update under its norm
    assert found["kept_bytes"] == found["least_kept_bytes"] == rows * dim * sum(sizes) + 4 * rows * norms


def test_a_storage_counts_once_and_whole() -> None:
    x = torch.ones(8, requires_grad=True)
    with kept_tensors() as kept:
        y = x.sin()  # keeps x
        _ = y[:4] * y[4:]  # keeps two halves of y
        _ = y.sum() * 2.0
    assert kept.nbytes() == 2 * 8 * 4
    assert kept.nbytes(without=[x]) == 8 * 4


def test_hooks_inside_decide_what_is_kept() -> None:
    """With a recipe in place of x nothing is left to count; without it x is."""
    x = torch.ones(8, requires_grad=True)
    for recipe, expected in ((True, 0), (False, 8 * 4)):
        inner = saved_tensors_hooks(lambda t, recipe=recipe: "recipe" if recipe else t, lambda packed: packed)
        with kept_tensors() as kept, inner:
            x.sin()
        assert kept.nbytes() == expected


def test_copies_of_parameters_are_found_by_value() -> None:
    layer = nn.Linear(3, 5, bias=False)
    with kept_tensors() as kept, torch.autocast("cpu", HALF):
        layer(torch.ones(4, 3, requires_grad=True)).sum()
    assert [tuple(copy.shape) for copy in kept.copies_of(layer.parameters())] in ([(5, 3)], [(3, 5)])
    assert kept.copies_of([nn.Parameter(torch.zeros(5, 3))]) == []


# Models


def test_flops_of_a_step() -> None:
    """Two layers of width 4, feed-forward 8, vocabulary 10, two rows of 3 tokens."""
    shape = ModelShape(dim=4, n_layers=2, n_heads=1, ffn_dim=8, vocab_size=10, seq_len=3, batch=2)
    matrices = 2 * (4 * 16 + 3 * 32) + 40
    pairs = 3 * 3 / 2  # half of all, as the count for causal attention goes
    attention = 2 * 2 * (2 * 2 * pairs * 4) * 3  # rows, layers, scores and sums of 2 operations a channel, back twice
    assert shape.matrix_parameters == matrices
    assert shape.step_flops == 6 * matrices * 6 + attention


def test_the_official_block_is_hybrid_pre() -> None:
    """With the same weights, the block written down from the equations gives the logits of ``siamese_hybrid_pre``."""
    shape = replace(TINY, n_layers=3)
    ours = DecoderLM(shape.config("siamese_hybrid_pre"))
    initialize(ours, seed=1)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    written = OfficialSiamese(shape)
    written.load_state_dict(_official_weights(ours))
    tokens = batches(shape, CPU)[0][:, :-1]
    torch.testing.assert_close(written(tokens), ours(tokens), rtol=1e-4, atol=1e-5)
    assert models.n_parameters(written) == models.n_parameters(ours)


def _official_weights(ours: DecoderLM) -> dict[str, torch.Tensor]:
    """Our weights under the names of the other."""
    w = ours.state_dict()
    found = {"embedding.weight": w["tok_embeddings.weight"], "head.weight": w["lm_head.weight"]}
    last = len(ours.layers) - 1
    for layer in range(len(ours.layers)):
        here, to = f"layers.{layer}.", f"blocks.{layer}."
        before = "before_layers." if layer == 0 else f"layers.{layer - 1}.after_feed_forward."
        attention, feed_forward = here + "attention.", here + "feed_forward."
        found[to + "c1"] = w[before + "read.c1"]
        found[to + "attention_y_norm.weight"] = w[before + "read.norm_y.weight"]
        found[to + "x_norm.weight"] = w[here + "after_attention.join.norm_x.weight"]
        found[to + "y_norm.weight"] = w[here + "after_attention.read.norm_y.weight"]
        found[to + "input_norm.weight"] = w[here + "after_attention.read.norm_in.weight"]
        found |= {f"{to}{head}_norm.weight": w[f"{attention}{head}_norm.weight"] for head in "qkv"}
        found[to + "qkv.weight"] = torch.cat([w[f"{attention}w{head}.weight"] for head in "qkv"])
        found[to + "attention_out.weight"] = w[attention + "wo.weight"]
        found[to + "gate_and_up.weight"] = torch.cat([w[f"{feed_forward}w_{name}.weight"] for name in ("gate", "up")])
        found[to + "down.weight"] = w[feed_forward + "w_down.weight"]
    end = f"layers.{last}.after_feed_forward."
    found["x_norm.weight"] = w[end + "join.norm_x.weight"]
    found["y_norm.weight"] = w[end + "read.norm_y.weight"]
    found["final_norm.weight"] = w[end + "read.norm_in.weight"]
    return found


@pytest.mark.parametrize(
    ("name", "package"), [("llama", "transformers"), ("x-transformers", "x_transformers"), ("litgpt", "litgpt")]
)
@pytest.mark.filterwarnings("ignore")
def test_other_libraries_build_the_same_size_and_loss(name: str, package: str) -> None:
    """Within 1 % of the parameters; at the start the loss is near that of guessing, ln V."""
    pytest.importorskip(package)
    shape = replace(SHAPES["small"], n_layers=2, seq_len=32, batch=1, vocab_size=512)
    trainee = step.build(f"{name}/eager", shape)
    step.check_size(name, trainee, shape)
    assert trainee.loss(batches(shape, CPU)[0]).item() == pytest.approx(math.log(512), abs=0.7)


def test_another_size_stops_the_benchmark() -> None:
    shape = replace(SHAPES["small"], n_layers=1)
    with pytest.raises(ValueError, match="parameters"):
        step.check_size("pre", step.build("pre/plain/eager", shape), replace(shape, n_layers=2))


def test_weight_copies_of_autocast_are_no_activations() -> None:
    data = batches(TINY, CPU)
    full, half = (Step(step.build("pre/plain/eager", TINY), data, precision).memory() for precision in ("fp32", "bf16"))
    assert full.weight_copies_bytes == 0
    assert half.weight_copies_bytes == 2 * TINY.matrix_parameters
    assert half.kept_bytes < full.kept_bytes
