"""Folding norms into the matrices behind them: exact where it is done, refused where it would not be."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from torch import Tensor, nn

from normstream.checkpoints.precise import Float64, answer, difference, exact_answer, in_float64
from normstream.checkpoints.save import file_tensors
from normstream.checkpoints.source import quiet_transformers
from normstream.checkpoints.surgery.fold import fold
from normstream.checkpoints.surgery.norm_readers import changed
from normstream.inspect.anatomy import Anatomy, Call, NormFacts, NormSite, Place, StackAnatomy
from normstream.inspect.inputs import make_inputs


class RMS(nn.Module):
    """x / rms(x) times a gain; eps 0."""

    def __init__(self, gain: list[float], shift: float = 0.0) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(gain, dtype=torch.float64)), shift

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt() * (self.gain + self.shift)


class Reads(nn.Module):
    """W norm(x), and if asked for the norm's output again beside it: a residual stream of its own."""

    def __init__(self, norm: nn.Module, weights: list[float], hidden_reader: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.hidden_reader = norm, hidden_reader
        self.reader = nn.Linear(2, 1, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            self.reader.weight.copy_(torch.tensor([weights]))
            if bias:
                self.reader.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return self.reader(z) + (z.sum(-1, keepdim=True) if self.hidden_reader else 0.0)


def anatomy(place: Place = "pre", gain: Any = "plain", kind: Any = "rms", bias: bool = False) -> Anatomy:
    facts = NormFacts("norm", kind, gain, bias, 0.0, "before_gain", 2, 2)
    site = NormSite(Call("norm"), place, ("ffn",), ("layers.0.ffn",), 0, "stream", facts)
    return Anatomy((StackAnatomy("main", (), (site,), (), 1.0),), None, False, None)


X = {"x": torch.tensor([[[3.0, 4.0], [1.0, -2.0]]], dtype=torch.float64)}


def test_gain_moves_into_the_reader() -> None:
    """FR-22: x = [3, 4], gain [2, 1], W = [1, 1]."""
    model = Reads(RMS([2.0, 1.0]), [1.0, 1.0])
    assert answer(model, X)[0, 0].item() == pytest.approx(2.8284271, abs=1e-7)
    report = fold(model, X, anatomy())
    assert model.reader.weight.tolist() == [[2.0, 1.0]]
    assert model.norm.gain.tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    assert answer(model, X)[0, 0].item() == pytest.approx(2.8284271, abs=1e-7)
    assert [(norm.path, norm.readers) for norm in report.folded] == [("norm", ("reader",))]


def test_zero_centred_gain_ends_as_zero() -> None:
    model = Reads(RMS([1.0, 0.0], shift=1.0), [1.0, 1.0])
    fold(model, X, anatomy(gain="one_plus_w"))
    assert model.reader.weight.tolist() == [[2.0, 1.0]]
    assert model.norm.gain.tolist() == [0.0, 0.0]  # type: ignore[union-attr]


def layer_norm(gain: list[float], bias: list[float]) -> nn.LayerNorm:
    norm = nn.LayerNorm(2, eps=0.0, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(gain))
        norm.bias.copy_(torch.tensor(bias))
    return norm


def test_layer_norm_bias_becomes_the_reader_s() -> None:
    """FR-22: bias [1, -1] and W = [2, 3] give b' = -1, whatever the gain."""
    model = Reads(layer_norm([2.0, 0.5], [1.0, -1.0]), [2.0, 3.0], bias=True)
    before = answer(model, X)
    fold(model, X, anatomy(kind="layer", bias=True))
    assert model.reader.bias.tolist() == [-1.0]
    assert model.reader.weight.tolist() == [[4.0, 1.5]]
    assert (model.norm.weight.tolist(), model.norm.bias.tolist()) == ([1.0, 1.0], [0.0, 0.0])  # type: ignore[union-attr]
    assert torch.equal(answer(model, X), before)


def test_bias_without_a_place_to_go() -> None:
    model = Reads(layer_norm([2.0, 0.5], [1.0, -1.0]), [2.0, 3.0])
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="it has a bias and reader has none to take it up"):
        fold(model, X, anatomy(kind="layer", bias=True))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("place", "reason"),
    [("trunk", "stands on the residual stream"), ("embedding", "stands on the residual stream"),
     ("output", "added to the residual stream"), ("q", "attention scores"), ("unknown", "could not tell")],
)  # fmt: skip
def test_places_that_are_refused(place: Place, reason: str) -> None:
    model = Reads(RMS([2.0, 1.0]), [1.0, 1.0])
    with pytest.raises(ValueError, match=rf"no norm of this model can be folded.*norm: .*{reason}"):
        fold(model, X, anatomy(place))
    assert model.norm.gain.tolist() == [2.0, 1.0]  # type: ignore[union-attr]


def test_post_norm_would_have_changed_the_residual() -> None:
    """FR-22: the residual [1.6970563, 1.1313708] would become [0.8485281, 1.1313708]."""
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert RMS([2.0, 1.0])(x).tolist() == pytest.approx([1.6970563, 1.1313708], abs=1e-7)
    assert RMS([1.0, 1.0])(x).tolist() == pytest.approx([0.8485281, 1.1313708], abs=1e-7)


def test_reader_that_nobody_listed() -> None:
    """The norm's output is also used outside any matrix: a fold would change the function, and does not happen."""
    model = Reads(RMS([2.0, 1.0]), [1.0, 1.0], hidden_reader=True)
    with pytest.raises(ValueError, match="something besides reader reads it"):
        fold(model, X, anatomy())
    assert model.norm.gain.tolist() == [2.0, 1.0]  # type: ignore[union-attr]


class Square(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.square())


def test_reader_that_is_not_linear() -> None:
    model = Reads(RMS([2.0, 1.0]), [1.0, 1.0])
    model.reader = Square(2, 1, bias=False, dtype=torch.float64)
    with pytest.raises(ValueError, match="reader is not linear in it"):
        fold(model, X, anatomy())


class Experts(nn.Module):
    """Tokens go to expert 0, all but the last expert's never."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMS([2.0, 1.0])
        self.experts = nn.ModuleList(nn.Linear(2, 1, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, chosen: int = 0) -> Tensor:
        return self.experts[chosen](self.norm(x).flatten(0, 1))


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts()])

    def forward(self, x: Tensor, chosen: int = 0) -> Tensor:
        return self.layers[0](x, chosen)


def test_experts_that_no_token_chose_are_folded_too() -> None:
    model = MoE()
    wiring = anatomy()
    site = wiring.norms[0]
    site = NormSite(Call("layers.0.norm"), "pre", ("ffn",), (), 0, "stream", site.facts)
    before = [answer(model, {**X, "chosen": i}) for i in range(3)]
    report = fold(model, X, Anatomy((StackAnatomy("main", (), (site,), (), 1.0),), None, False, None))
    assert report.folded[0].readers == tuple(f"layers.0.experts.{i}" for i in range(3))
    assert all(torch.allclose(answer(model, {**X, "chosen": i}), before[i], atol=1e-15) for i in range(3))


FAMILIES = {  # norms that can be folded, of all that have a gain
    "llama": (9, 9),
    "gemma2": (8, 17),  # half are output norms, the head is tied
    "mixtral": (9, 9),
    "deepseek_v3": (17, 17),  # latent norms too
    "gpt2": (8, 9),
    "phi": (5, 5),  # one norm for both branches
    "olmo2": (1, 17),  # the final norm
    "t5": (21, 22),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = tiny_model(family)
    inputs = make_inputs(model)
    before, exact_before = answer(model, inputs), exact_answer(model, inputs)
    report = fold(model, inputs)
    assert (len(report.folded), len(report.folded) + len(report.refused)) == FAMILIES[family]
    assert report.exact_error < 1e-10
    assert report.error == difference(answer(model, inputs), before) < 1e-5
    assert difference(exact_answer(model, inputs), exact_before) < 1e-6  # folded weights are rounded to float32
    other = make_inputs(model, n_tokens=23, seed=5)
    assert difference(answer(model, other), answer(tiny_model(family), other)) < 1e-5
    gains: list[Any] = [model.get_submodule(norm.path).weight for norm in report.folded]
    assert all(torch.all(gain == (0.0 if family == "gemma2" else 1.0)) for gain in gains)


def test_router_and_experts_take_the_gain(tmp_path: Path) -> None:
    """Written as a file, every single expert has it."""
    model: Any = tiny_model("mixtral")
    gain = model.model.layers[0].post_attention_layernorm.weight.detach().clone().double()
    old = file_tensors(copy.deepcopy(model))
    fold(model)
    new = file_tensors(model)
    block = "model.layers.0.block_sparse_moe"
    for name in [f"{block}.gate.weight", *(f"{block}.experts.{i}.{w}.weight" for i in range(4) for w in ("w1", "w3"))]:
        assert torch.equal(new[name], (old[name].double() * gain).float())
    assert torch.equal(new[f"{block}.experts.0.w2.weight"], old[f"{block}.experts.0.w2.weight"])


def test_folding_twice_changes_nothing() -> None:
    model = tiny_model("llama")
    fold(model)
    state = copy.deepcopy(model.state_dict())
    assert fold(model).error == 0.0
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_bert_is_refused() -> None:
    """Post-Norm: the norms stand on the stream; the one in the head has a tied matrix behind it."""
    model = tiny_model("bert")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"no norm of this model can be folded.*residual stream"):
        fold(model)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_tied_head_is_refused() -> None:
    report = fold(tiny_model("gemma2"))
    assert (
        report.refused["model.norm"]
        == "lm_head.weight is tied to model.embed_tokens.weight, which would change with it"
    )


def test_bfloat16_is_rounded_once() -> None:
    model: Any = tiny_model("llama", dtype=torch.bfloat16)
    layer = model.model.layers[0]
    expected = (layer.mlp.up_proj.weight.double() * layer.post_attention_layernorm.weight.double()).bfloat16()
    report = fold(model)
    assert torch.equal(layer.mlp.up_proj.weight, expected)
    assert report.exact_error < 1e-10
    assert 0 < report.error < 0.1


def test_folded_model_loads_in_transformers(tmp_path: Path) -> None:
    import transformers

    model: Any = tiny_model("qwen3_moe")
    inputs = make_inputs(model)
    fold(model, inputs)
    with quiet_transformers():
        model.save_pretrained(tmp_path)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert difference(answer(loaded, inputs), answer(model, inputs)) < 1e-6


def test_float64_holds_inside_norms() -> None:
    """Norms of transformers compute in float32, whatever they are given, unless they are run inside the mode."""
    model, x = tiny_model("llama").double(), torch.randn(1, 1, 32, dtype=torch.float64)
    norm = model.get_submodule("model.layers.0.input_layernorm")
    expected = norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()  # type: ignore
    assert (norm(x) - expected).abs().max() > 1e-9
    with Float64():
        assert (norm(x) - expected).abs().max() < 1e-14
    assert {parameter.dtype for parameter in in_float64(model).parameters()} == {torch.float64}


def test_changed_parameters_come_back() -> None:
    parameter = nn.Parameter(torch.randn(2))
    kept = parameter.detach().clone()
    with changed(parameter, torch.zeros(2)):
        assert not parameter.any()
    assert torch.equal(parameter, kept)
