"""Values inside branches that overflow although the stream does not, and rows that a place is linear in."""

from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from tests.checkpoints.by_hand import TOKENS, Toy, anatomy_of_toy
from torch import nn

from normstream.checkpoints.rescaling.feeders import Bench, linear_rows, make_bench
from normstream.checkpoints.rescaling.report import BranchRow, RescaleReport
from normstream.checkpoints.rescaling.rescale import apply, rescale
from normstream.inspect.anatomy import Call
from normstream.inspect.hooks import Recorder
from normstream.inspect.inputs import make_inputs


def bench_of(model: nn.Module, layer: str) -> Bench:
    recorder = Recorder(model).__enter__()
    run = recorder.run(make_inputs(model, n_tokens=13), keep=frozenset([layer]))
    return make_bench(recorder, run.records[Call(layer)])


# Rows that a place is linear in. Heads of 8 features: 4 of queries, 2 of keys and values unless said otherwise.


@pytest.mark.parametrize(
    ("family", "layer", "source", "target", "rows"),
    [
        ("llama", "model.layers.1", "self_attn.v_proj", "self_attn.o_proj", None),
        ("llama", "model.layers.1", "self_attn.q_proj", "self_attn.o_proj", "none"),
        ("llama", "model.layers.1", "mlp.up_proj", "mlp.down_proj", None),
        ("llama", "model.layers.1", "mlp.gate_proj", "mlp.down_proj", "none"),
        ("gpt2", "transformer.h.1", "attn.c_attn", "attn.c_proj", range(64, 96)),  # q, k, v of 32 each
        ("gpt2", "transformer.h.1", "mlp.c_fc", "mlp.c_proj", "none"),  # GELU
        ("glm4", "model.layers.1", "mlp.gate_up_proj", "mlp.down_proj", range(48, 96)),
        ("phi3", "model.layers.1", "self_attn.qkv_proj", "self_attn.o_proj", range(48, 64)),  # 32 + 16 + 16
        ("opt", "model.decoder.layers.1", "fc1", "fc2", None),  # ReLU
    ],
)
def test_linear_rows(family: str, layer: str, source: str, target: str, rows: Any) -> None:
    bench = bench_of(tiny_model(family), layer)
    feeder = linear_rows(bench, Call(f"{layer}.{source}"), Call(f"{layer}.{target}"))
    if rows == "none":
        assert feeder is None
    else:
        assert feeder is not None
        assert feeder.rows == (None if rows is None else tuple(rows))


def test_linear_rows_of_heads_in_turns() -> None:
    """GPT-NeoX: q, k and v of one head, then those of the next."""
    bench = bench_of(tiny_model("gpt_neox"), "gpt_neox.layers.1")
    at = "gpt_neox.layers.1.attention"
    feeder = linear_rows(bench, Call(f"{at}.query_key_value"), Call(f"{at}.dense"))
    assert feeder is not None
    assert feeder.rows == tuple(24 * head + row for head in range(4) for row in range(16, 24))


# Splits


def overflowing(source: str) -> tuple[nn.Module, RescaleReport, nn.Module]:
    """A model with a branch scaled up by 2^20 at one matrix of layer 1, and down again behind it."""
    model = Toy()
    layer: Any = model.layers[1]
    with torch.no_grad():
        matrix = layer.get_submodule(source)
        matrix.weight.mul_(2.0**20)
        matrix.bias.mul_(2.0**20)
        last = layer.attention.o if source.startswith("attention") else layer.feed_forward.down
        last.weight.mul_(2.0**-20)
    result = rescale(model, TOKENS, k=2, anatomy=anatomy_of_toy(), per_norm_eps=True)
    return model, result.report, result.model


def rows_of(report: RescaleReport) -> dict[tuple[str, str], BranchRow]:
    return {(row.call.removeprefix("layers.1."), row.side): row for row in report.branches}


def test_values_of_attention_are_split() -> None:
    model, report, new = overflowing("attention.v")
    rows = rows_of(report)
    assert rows.keys() == {("attention.v", "output"), ("attention.o", "input")}
    power = {row.split for row in rows.values()}.pop()
    assert power is not None
    largest = max(row.peak for row in rows.values())
    assert largest / 2**power * 16 <= 65504 < largest / 2 ** (power - 1) * 16
    assert all(row.after == row.peak / 2**power for row in rows.values())
    assert report.error_fp64 == 0
    assert report.is_bit_equal_fp32
    assert (report.fp16_before.is_finite, report.fp16_after.is_finite) == (False, True)
    old: Any = model.get_submodule("layers.1")
    changed: Any = new.get_submodule("layers.1")
    assert torch.equal(changed.attention.v.bias, old.attention.v.bias / 2**power)
    assert torch.equal(changed.attention.o.weight, old.attention.o.weight * 2.0 ** (power - 2))
    assert torch.equal(changed.attention.o.bias, old.attention.o.bias / 4)


def test_up_projection_is_split() -> None:
    _, report, _ = overflowing("feed_forward.up")
    rows = rows_of(report)
    assert rows.keys() == {("feed_forward.up", "output"), ("feed_forward.down", "input")}
    assert all(row.split and row.after * 16 <= 65504 for row in rows.values())
    assert report.error_fp64 == 0
    assert report.fp16_after.is_finite


def test_gate_cannot_be_split() -> None:
    _, report, _ = overflowing("feed_forward.gate")
    row = rows_of(report)["feed_forward.gate", "output"]
    assert row.split is None
    assert row.after == row.peak > 65504
    assert "non-linearity" in row.why
    assert not report.fp16_after.is_finite


def with_large_projection(model: Any) -> nn.Module:
    with torch.no_grad():
        model.layers[1].attention.o.weight.mul_(2.0**20)
        model.layers[1].attention.o.bias.mul_(2.0**20)
    return model


def test_projection_before_an_output_norm_with_an_eps_of_its_own() -> None:
    model, anatomy = with_large_projection(Toy(sandwich=True)), anatomy_of_toy(sandwich=True)
    result = rescale(model, TOKENS, k=2, anatomy=anatomy, per_norm_eps=True)
    row = rows_of(result.report)["attention.o", "output"]
    assert row.split is not None
    assert result.model.get_submodule("layers.1.after.0").eps == 1e-6 / 4**row.split
    assert result.report.error_fp64 == 0
    assert result.report.fp16_after.is_finite


def test_projection_before_an_output_norm_with_a_shared_eps() -> None:
    """The scale of the stream is the projection's too: 2^k is all there is."""
    model: Any = tiny_model("glm4")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(2.0**17)
    rows = {(row.call, row.side): row for row in rescale(model, k=1).report.branches}
    row = rows["model.layers.1.self_attn.o_proj", "output"]
    assert row.split is None
    assert "shares its eps" in row.why


def test_plan_is_carried_out_anew_with_its_splits() -> None:
    model = Toy()
    layer: Any = model.layers[1]
    with torch.no_grad():
        layer.feed_forward.up.weight.mul_(2.0**20)
        layer.feed_forward.down.weight.mul_(2.0**-20)
    result = rescale(model, TOKENS, k=2, anatomy=anatomy_of_toy(), per_norm_eps=True)
    again = apply(model, result.plan)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, result.model.get_parameter(name))
