"""The logit lens, against the final norm and head of each model applied by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.inspect.wired import wired
from torch import Tensor

from normstream import placements
from normstream.init import initialize
from normstream.inspect.inspection import LensRow
from normstream.inspect.measures.lens import logit_lens
from normstream.inspect.measures.loss import loss_of
from normstream.models import DecoderConfig, DecoderLM


def expected_row(final: Tensor, lens: Tensor, targets: Tensor) -> tuple[float, float, float]:
    """Loss, KL(final || lens) and agreement, for logits of the positions that have a target."""
    kl = F.kl_div(lens.log_softmax(-1), final.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    return F.cross_entropy(lens, targets).item(), kl.item(), (final.argmax(-1) == lens.argmax(-1)).float().mean().item()


def check(rows: tuple[LensRow, ...], final: Tensor, lenses: list[Tensor], targets: Tensor) -> None:
    assert len(rows) == len(lenses)
    for row, lens in zip(rows, lenses, strict=True):
        found = (row.loss, row.kl_to_final, row.top1_agreement)
        assert found == pytest.approx(expected_row(final, lens, targets), rel=1e-4, abs=1e-6)


@torch.no_grad()
def test_the_lens_of_a_pre_norm_model_is_final_norm_and_head() -> None:
    case = wired("llama")
    output = case.model(**case.inputs, output_hidden_states=True)
    norm, head = case.model.model.norm, case.model.lm_head
    lenses = [head(norm(stream))[0, :-1] for stream in output.hidden_states[1:-1]]
    rows, notes = logit_lens(case.model, case.inputs, case.anatomy)
    check(rows[:-1], output.logits[0, :-1], lenses, case.inputs["input_ids"][0, 1:])
    assert [(row.stack, row.stream, row.layer) for row in rows] == [("main", "x", layer) for layer in range(4)]
    assert notes == ()


@torch.no_grad()
def test_a_soft_cap_of_the_logits_is_part_of_the_lens() -> None:
    case = wired("gemma2")
    output = case.model(**case.inputs, output_hidden_states=True)
    cap = case.model.config.final_logit_softcapping
    raw = [case.model.lm_head(case.model.model.norm(stream))[0, :-1] for stream in output.hidden_states[1:-1]]
    rows, _ = logit_lens(case.model, case.inputs, case.anatomy)
    lenses = [cap * torch.tanh(logits / cap) for logits in raw]
    check(rows[:-1], output.logits[0, :-1], lenses, case.inputs["input_ids"][0, 1:])


@torch.no_grad()
def test_the_lens_of_bert_is_its_whole_head_at_all_positions() -> None:
    case = wired("bert")
    output = case.model(**case.inputs, output_hidden_states=True)
    lenses = [case.model.cls(stream)[0] for stream in output.hidden_states[1:]]
    rows, _ = logit_lens(case.model, case.inputs, case.anatomy)
    check(rows, output.logits[0], lenses, case.inputs["input_ids"][0])


@torch.no_grad()
def test_only_the_decoder_of_two_stacks_has_a_lens() -> None:
    case = wired("t5")
    streams: list[Tensor] = []
    for block in case.model.decoder.block:
        block.register_forward_hook(lambda module, args, output: streams.append(output[0]))
    final = case.model(**case.inputs).logits
    factor = 32**-0.5 if case.model.config.tie_word_embeddings else 1
    lenses = [case.model.lm_head(case.model.decoder.final_layer_norm(s) * factor)[0, :-1] for s in streams]
    rows, _ = logit_lens(case.model, case.inputs, case.anatomy)
    check(rows, final[0, :-1], lenses, case.inputs["decoder_input_ids"][0, 1:])
    assert {row.stack for row in rows} == {"decoder"}


@torch.no_grad()
def test_two_streams_are_read_together_and_each_alone() -> None:
    model: Any = DecoderLM(DecoderConfig(placement="siamese", dim=16, n_layers=2, n_heads=2)).eval()
    initialize(model, seed=0)
    tokens = torch.arange(7)[None]
    rows, _ = logit_lens(model, {"tokens_BT": tokens}, None)
    (context,) = model._contexts(torch.arange(7)[None], None, 7, None).values()
    state, z = model.before_layers((), model.tok_embeddings(tokens))
    (x, y), z, _ = model.layers[0](state, z, context)
    read: Any = model.layers[1].after_feed_forward.read
    together = x + read.norm_y(y)
    lenses = [model.lm_head(read.norm_in(z))[0, :-1] for z in (together, x, read.norm_y(y))]
    assert [row.stream for row in rows[:3]] == ["x+y", "x", "y"]
    check(rows[:3], model(tokens)[0, :-1], lenses, tokens[0, 1:])


@pytest.mark.parametrize("placement", placements.names())
def test_the_lens_of_the_last_layer_is_the_model(placement: str) -> None:
    model = DecoderLM(DecoderConfig(placement=placement, dim=16, n_layers=2, n_heads=2)).eval()
    initialize(model, seed=0)
    inputs = {"tokens_BT": torch.arange(7)[None]}
    rows, _ = logit_lens(model, inputs, None)
    joint = "+".join(model.streams)
    (last,) = [row for row in rows if row.layer == 1 and row.stream == joint]
    assert last.loss == pytest.approx(loss_of(model, inputs, None), rel=1e-6)
    assert (last.kl_to_final, last.top1_agreement) == (pytest.approx(0, abs=1e-6), 1.0)


def test_without_a_loss_there_is_no_lens() -> None:
    case = wired("bert")
    case.model.cls = torch.nn.Linear(32, 5)
    rows, notes = logit_lens(case.model, case.inputs, case.anatomy)
    assert rows == ()
    assert "no loss" in notes[0]
