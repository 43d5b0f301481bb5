"""Head and loss in chunks against the same from whole logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normstream import DecoderConfig, DecoderLM, initialize
from normstream.data import Data
from normstream.tasks import chunked_loss
from normstream.tasks.chunked_loss import head_loss
from normstream.training import TrainConfig, read_metrics, train

Make = Callable[..., TrainConfig]
VOCAB = 50
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"head_bias": True},
    "tied": {"tied": True},
    "cap": {"logit_cap": 2.0, "head_bias": True},
    "multiplier": {"logit_multiplier": 0.3, "head_bias": True},
    "scale": {"placement": "ngpt", "head_bias": True},
    "all": {"placement": "ngpt", "head_bias": True, "logit_cap": 2.0, "logit_multiplier": 3.0, "tied": True},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven positions a chunk, so that 24 give four, the last one short."""
    monkeypatch.setattr(chunked_loss, "chunk_rows", lambda n_rows, vocab_size: 7)


def model_of(**options: Any) -> DecoderLM:
    model = DecoderLM(
        DecoderConfig(**{"placement": "pre", "vocab_size": VOCAB, "dim": 16, "n_layers": 1, "n_heads": 2} | options)
    )
    initialize(model, seed=0)
    for name, parameter in model.named_parameters():
        if name in ("lm_head.bias", "logit_scale.weight"):
            nn.init.normal_(parameter, std=0.5)
    return model


def inputs() -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(0, VOCAB, (2, 12)), torch.randint(0, VOCAB, (2, 12))
    targets[0, 2:5] = -100
    targets[1, -1] = -100
    return tokens, targets


def plain(model: DecoderLM, tokens: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = (
        model(tokens).flatten(0, 1).to(torch.float64 if model.lm_head.weight.dtype == torch.float64 else torch.float32)
    )
    cross_entropy = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    z = logits.logsumexp(-1)[targets.flatten() != -100].square().sum()
    return cross_entropy + z_loss * z, cross_entropy, z


def gradients(model: DecoderLM) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_in_float64(form: str, z_loss: float):
    model, (tokens, targets) = model_of(**FORMS[form]).double(), inputs()
    expected = plain(model, tokens, targets, z_loss)
    (expected[0] / 3).backward()
    wanted = gradients(model)
    loss, cross_entropy, z = head_loss(model, model.hidden(tokens), targets, z_loss)
    torch.testing.assert_close((loss, cross_entropy, z), expected, rtol=1e-12, atol=0)
    (loss / 3).backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_the_plain_loss(form: str):
    model, (tokens, targets) = model_of(**FORMS[form]), inputs()
    expected = plain(model, tokens, targets, 0.0)[0]
    assert head_loss(model, model.hidden(tokens), targets)[0].item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_no_worse_than_the_plain_path(form: str):
    """Errors against float64 of the loss, of the gradient and of the head's: at most a quarter more than autocast's."""
    tokens, targets = inputs()
    exact, model = model_of(**FORMS[form]).double(), model_of(**FORMS[form])
    exact.load_state_dict(model.state_dict())
    loss = plain(exact, tokens, targets, 0.0)[0]
    loss.backward()
    wanted = gradients(exact)

    def error_of(found: dict[str, Tensor], names: list[str]) -> float:
        off, all_of_it = (torch.cat([g[n].flatten().double() for n in names]) for g in (found, wanted))
        return ((off - all_of_it).norm() / all_of_it.norm()).item()

    def errors(path: Callable[[], Tensor]) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16):
            value = path()
        value.backward()
        assert value.dtype == torch.float32
        found = gradients(model)
        head = "tok_embeddings.weight" if model.config.tied else "lm_head.weight"
        return [abs(value.item() / loss.item() - 1), error_of(found, list(found)), error_of(found, [head])]

    with_logits = errors(lambda: plain(model, tokens, targets, 0.0)[0])
    chunked = errors(lambda: head_loss(model, model.hidden(tokens), targets)[0])
    assert chunked[0] < 2e-3
    for ours, theirs in zip(chunked[1:], with_logits[1:], strict=True):
        assert ours <= 1.25 * theirs


def test_no_position_counts():
    model, (tokens, targets) = model_of(head_bias=True), inputs()
    loss = head_loss(model, model.hidden(tokens), torch.full_like(targets, -100), 0.1)[0]
    loss.backward()
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_a_frozen_head():
    model, (tokens, targets) = model_of(head_bias=True), inputs()
    model.lm_head.requires_grad_(False)
    plain(model, tokens, targets, 0.0)[0].backward()
    wanted = gradients(model)
    head_loss(model, model.hidden(tokens), targets)[0].backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    assert "lm_head.weight" not in found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_backward_runs_once():
    model, (tokens, targets) = model_of(), inputs()
    loss = head_loss(model, model.hidden(tokens), targets)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="it can run once only"):
        loss.backward()


def test_the_logits_are_never_there_as_a_whole():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                Largest.elements = max(Largest.elements, out.numel())
            return out

    model, tokens = model_of(vocab_size=2000), torch.randint(0, 2000, (2, 100))
    with Largest():
        head_loss(model, model.hidden(tokens), tokens)[0].backward()
    assert Largest.elements < 200 * 2000 / 5


def test_who_takes_chunks(config: Make):
    """auto: CUDA and a large vocabulary."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    small, large = config(vocab_size=32_767), config(vocab_size=32_768)
    assert [c.is_chunked(d) for c in (small, large) for d in (cpu, gpu)] == [False, False, False, True]
    assert config(chunked_loss="always").is_chunked(cpu)
    assert not config(chunked_loss="never", vocab_size=50_000).is_chunked(gpu)


@pytest.mark.parametrize("options", [{}, {"grad_accumulation": 2, "z_loss": 1e-3, "tied": True}, {"precision": "bf16"}])
def test_a_run_is_the_same(options: dict[str, Any], config: Make, data: Data, tmp_path: Path):
    for choice in ("never", "always"):
        train(config(chunked_loss=choice, **options), tmp_path / choice, data=data)
    one, two = (read_metrics(tmp_path / choice / "metrics.jsonl", "train") for choice in ("never", "always"))
    close = 2e-2 if options.get("precision") == "bf16" else 1e-4
    assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=1e-6)
    for key in ("loss", "grad_norm", "z_loss"):
        assert [row.get(key, 0.0) for row in two] == pytest.approx([row.get(key, 0.0) for row in one], rel=close)


def test_fp16_scales_the_gradients(config: Make, data: Data, tmp_path: Path):
    for choice in ("never", "always"):
        train(config(chunked_loss=choice, precision="fp16"), tmp_path / choice, data=data)
    one, two = (read_metrics(tmp_path / choice / "metrics.jsonl", "train") for choice in ("never", "always"))
    assert [row["grad_norm"] for row in two] == pytest.approx([row["grad_norm"] for row in one], rel=2e-2)
