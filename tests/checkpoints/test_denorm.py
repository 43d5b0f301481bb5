"""Fine-tuning norms out: the published schedule, what a fixed statistic computes, and a small model from end to end."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.tiny_models import randomize, tiny_config, tiny_model
from torch import Tensor, nn

from normstream.checkpoints.precise import answer, difference
from normstream.checkpoints.source import quiet_transformers
from normstream.checkpoints.surgery.denorm import DenormConfig, Removal, denorm, removal_schedule
from normstream.checkpoints.surgery.fixed_norms import FixableNorms, check_pre_norm
from normstream.data import Data, DataConfig, load_data
from normstream.inspect.anatomy import Anatomy, StackAnatomy
from normstream.inspect.inputs import make_inputs
from normstream.inspect.probing.probe import anatomy_of


def test_official_schedule() -> None:
    """Twelve layers: the numbers that the official training script computes for GPT-2 small."""
    removals = removal_schedule(DenormConfig(), 12)
    starts = {what: min(r.step for r in removals if r.what == what) for what in ("ffn", "qk", "v", "final")}
    assert starts == {"ffn": 200, "qk": 440, "v": 680, "final": 1040}
    assert Removal(420, "ffn", 11) in removals
    assert Removal(440 + 5 * 20, "qk", 5) in removals
    assert Removal(680 + 11 * 30, "v", 11) in removals
    assert removals[-2:] == (Removal(1060, "special"), Removal(1160, "first"))
    assert len(removals) == 3 * 12 + 3
    assert [r.step for r in removals] == sorted(r.step for r in removals)


def test_gap_of_zero_takes_all_layers_at_once() -> None:
    removals = removal_schedule(DenormConfig(start=3, ffn_gap=0, qk_gap=2, v_gap=0, special_gap=1, first_gap=0), 2)
    assert [(r.step, r.what, r.layer) for r in removals] == [
        *((3, "ffn", 0), (3, "ffn", 1), (3, "qk", 0), (5, "qk", 1), (7, "v", 0), (7, "v", 1)),
        *((7, "final", None), (8, "special", None), (8, "first", None)),
    ]


def test_negative_gap() -> None:
    with pytest.raises(ValueError, match="v_gap must be at least 0, got -1"):
        DenormConfig(v_gap=-1)


def one_layer(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model)
    return model


def fixable(family: str) -> tuple[Any, dict[str, Any], FixableNorms]:
    model = one_layer(family)
    inputs = make_inputs(model)
    return model, inputs, FixableNorms(model, inputs, anatomy_of(model, inputs))


def rows(norms: FixableNorms, path: str) -> list[int]:
    mask = norms.norms[0].readers[path]["v"]
    assert mask is not None
    return mask.nonzero().flatten().tolist()


def test_rows_of_values() -> None:
    """GPT-2's fused matrix is q | k | v; NeoX's is q, k, v of one head after another; Llama's are apart."""
    _, _, gpt2 = fixable("gpt2")
    assert rows(gpt2, "transformer.h.0.attn.c_attn") == list(range(64, 96))
    _, _, neox = fixable("gpt_neox")
    heads = [range(24 * head + 16, 24 * head + 24) for head in range(4)]
    assert rows(neox, "gpt_neox.layers.0.attention.query_key_value") == [row for head in heads for row in head]
    _, _, llama = fixable("llama")
    projections = {path.rpartition(".")[2]: set(routes) for path, routes in llama.norms[0].readers.items()}
    assert projections == {"q_proj": {"qk"}, "k_proj": {"qk"}, "v_proj": {"v"}}


def test_statistics_are_means_over_tokens() -> None:
    model, inputs, norms = fixable("gpt2")
    seen: list[Tensor] = []
    handle = model.transformer.h[0].ln_2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with norms:
        norms.measure([lambda: model(**inputs)])
    handle.remove()
    deviation = (seen[0].var(-1, correction=0) + model.config.layer_norm_epsilon).sqrt()
    norm = next(norm for norm in norms.norms if norm.path == "transformer.h.0.ln_2")
    assert norm.first == pytest.approx(deviation[0, 0].item(), rel=1e-3)  # eps is measured to about a percent
    assert norm.others == pytest.approx(deviation[0, 1:].mean().item(), rel=1e-3)


def test_fixed_feed_forward_norm() -> None:
    """Layer 0's: (x - mean) / sigma, another sigma for the first position, gain and bias as before."""
    model, inputs, norms = fixable("gpt2")
    ln = model.transformer.h[0].ln_2
    seen: list[tuple[Tensor, Tensor]] = []
    with norms:
        norm = next(norm for norm in norms.norms if norm.path == "transformer.h.0.ln_2")
        norm.first, norm.others = 2.0, 0.5
        norms.fix("ffn", 0)
        handle = ln.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
        model(**inputs)
        handle.remove()
        (x, z), n_real = seen[0], norms.n_real
    assert n_real == len(norms.norms) - 1
    centred = x - x.mean(-1, keepdim=True)
    assert torch.allclose(z[:, 0], centred[:, 0] / 2.0 * ln.weight + ln.bias, atol=1e-6)
    assert torch.allclose(z[:, 1:], centred[:, 1:] / 0.5 * ln.weight + ln.bias, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_queries_and_keys_before_values(family: str) -> None:
    """With sigma 1 on q's and k's route alone: their rows read the fixed output, v's the token's own."""
    model, inputs, norms = fixable(family)
    layer = model.transformer.h[0] if family == "gpt2" else model.model.layers[0]
    norm = layer.ln_1 if family == "gpt2" else layer.input_layernorm
    names = ["attn.c_attn"] if family == "gpt2" else [f"self_attn.{x}_proj" for x in "qkv"]
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Any:
        return lambda module, args, output: seen.update({name: (args[0], output)})

    with norms:
        norms.fix("qk", 0)
        handles = [layer.get_submodule(name).register_forward_hook(watch(name)) for name in names]
        handles.append(norm.register_forward_hook(watch("norm")))
        model(**inputs)
        for handle in handles:
            handle.remove()
    x, real = seen["norm"]
    if family == "gpt2":
        fixed = (x - x.mean(-1, keepdim=True)) * norm.weight + norm.bias
        c_attn, output = layer.attn.c_attn, seen["attn.c_attn"][1]
        expected = torch.cat([fixed @ c_attn.weight[:, :64], real @ c_attn.weight[:, 64:]], -1) + c_attn.bias
        assert torch.allclose(output, expected, atol=1e-5)
        return
    for name, z in zip(names, (x * norm.weight, x * norm.weight, real), strict=True):
        assert torch.allclose(seen[name][1], F.linear(z, layer.get_submodule(name).weight), atol=1e-5)


def test_special_tokens_in_the_values_path() -> None:
    """An end-of-text token keeps the first position's statistic, for values only, until that is given up."""
    model, inputs, norms = fixable("llama")
    layer, position = model.model.layers[0], 7
    norms.special_BT = torch.zeros(1, inputs["input_ids"].shape[1], dtype=torch.bool)
    norms.special_BT[0, position] = True
    seen: dict[str, Tensor] = {}
    with norms:
        norms.norms[0].first, norms.norms[0].others = 4.0, 1.0
        norms.fix("qk", 0)
        norms.fix("v", 0)
        for key in ("q_proj", "v_proj"):
            layer.self_attn.get_submodule(key).register_forward_hook(
                lambda module, args, output, key=key: seen.update({key: output})
            )
        layer.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
        model(**inputs)
        plain = seen["x"] * layer.input_layernorm.weight
        q, v = (F.linear(plain, layer.self_attn.get_submodule(key).weight)[0] for key in ("q_proj", "v_proj"))
        assert torch.allclose(seen["q_proj"][0, position], q[position], atol=1e-5)
        assert torch.allclose(seen["v_proj"][0, position], v[position] / 4, atol=1e-5)
        assert torch.allclose(seen["v_proj"][0, 0], v[0] / 4, atol=1e-5)
        assert torch.allclose(seen["v_proj"][0, 1], v[1], atol=1e-5)
        norms.keeps_special = False
        model(**inputs)
        assert torch.allclose(seen["v_proj"][0, position], v[position], atol=1e-5)
        norms.keeps_first = False
        model(**inputs)
        assert torch.allclose(seen["v_proj"][0, 0], v[0], atol=1e-5)


def test_hooks_leave_the_model_alone() -> None:
    model, inputs, norms = fixable("gpt2")
    before = answer(model, inputs)
    with norms:
        norms.fix("ffn", 0)
        norms.fix("v", 0)
        assert difference(answer(model, inputs), before) > 1e-3
        norms.reset()
        assert torch.equal(answer(model, inputs), before)
        norms.fix("final")
    assert torch.equal(answer(model, inputs), before)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3", r"q_norm is no pre norm and no final norm \(q\)"),
        ("olmo2", r"\((q|output)\)"),
        ("olmo", "has no gain"),
    ],
)
def test_models_that_are_refused(family: str, reason: str) -> None:
    model = one_layer(family)
    inputs = make_inputs(model)
    with pytest.raises(ValueError, match=reason):
        FixableNorms(model, inputs, anatomy_of(model, inputs))


def test_two_stacks_are_refused() -> None:
    stacks = tuple(StackAnatomy(name, (), (), (), 1.0) for name in ("encoder", "decoder"))
    with pytest.raises(ValueError, match="expected a decoder of one stack, got encoder, decoder"):
        check_pre_norm(Anatomy(stacks, None, False, None))


# A small model, from training to the stored form


TEXT = "the stream goes on and the norm reads it. " * 3 + "a norm stands between the stream and its reader. " * 3
QUICK = DenormConfig(
    *(4, 2, 2, 2, 2, 2, 10),
    lr=3e-3, warmup=2, decay_steps=60, batch_size=4, eval_batches=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        (folder / f"{i}.txt").write_text(TEXT[i:])
    return load_data(DataConfig(source=str(folder), seq_len=32, cross_document_attention=True))


@pytest.fixture(scope="module")
def gpt2(data: Data) -> nn.Module:
    """A tiny GPT-2 with some training behind it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=32)).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(80):
        tokens = data.train.batch([i % len(data.train) for i in range(4 * step, 4 * step + 4)])
        logits = model(input_ids=tokens.inputs_BT).logits
        F.cross_entropy(logits.flatten(0, 1), tokens.targets_BT.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_denorm(gpt2: nn.Module, data: Data, tmp_path: Path) -> None:
    """The stored model has no norm that looks at its token, is as good as before, and loads in plain transformers."""
    import transformers

    state, steps = copy.deepcopy(gpt2.state_dict()), []
    stored, report = denorm(gpt2, data, QUICK, steps.append)
    assert all(torch.equal(state[name], value) for name, value in gpt2.state_dict().items())
    assert [step.norms for step in steps][:1] + [step.norms for step in steps][-1:] == [5, 0]
    assert len(steps) == report.removals[-1].step + 10
    assert report.loss_control is not None
    assert report.loss_after < report.loss_before
    assert report.loss_after < report.loss_fixed_at_once
    assert abs(report.loss_after - report.loss_control) < 0.3
    assert report.stored_error < 1e-4
    with quiet_transformers():
        stored.save_pretrained(tmp_path)  # type: ignore[operator]
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert difference(answer(loaded, make_inputs(loaded)), answer(stored, make_inputs(stored))) < 1e-5
    norm = loaded.transformer.h[1].ln_2
    x, y = torch.randn(2, 32), torch.randn(2, 32)
    bias = norm(torch.zeros(2, 32))
    linear = 3 * (norm(x) - bias) - (norm(y) - bias)  # a linear map and a bias, which no working norm is
    assert torch.allclose(norm(3 * x - y) - bias, linear, rtol=1e-4, atol=1e-5)


def test_tokenizer_that_is_too_large(data: Data) -> None:
    with pytest.raises(ValueError, match="the tokenizer has 257 tokens, the model 128"):
        denorm(tiny_model("gpt2"), data, QUICK)


def test_divergence_is_an_error(gpt2: nn.Module, data: Data) -> None:
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at update \d+; lower lr"):
        denorm(gpt2, data, replace(QUICK, lr=1e30, clip=1e30))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("eval_batches", -1, "eval_batches must be at least 1, got -1"),
        ("rest", 0, "rest must be at least 1, got 0"),
        ("clip", -1.0, "clip must be a positive finite number, got -1.0"),
        ("lr", float("nan"), "lr must be a positive finite number, got nan"),
    ],
)
def test_numbers_that_make_no_sense(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DenormConfig(**{name: value})


def test_sequences_that_are_too_long() -> None:
    data = load_data(DataConfig("stdlib", seq_len=512, cross_document_attention=True))
    model = tiny_model("gpt2")
    longest = model.config.n_positions  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=f"sequences have 512 tokens, the model takes {longest}"):
        denorm(model, data)
