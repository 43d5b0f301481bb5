"""Rescaling models that are written out: what FR-12 asks for, and what is refused."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.tiny_models import tiny_model
from tests.checkpoints.by_hand import TOKENS, FeedForward, Toy, anatomy_of_toy
from torch import Tensor, nn

from normstream.checkpoints.precise import difference, exact_answer
from normstream.checkpoints.rescaling import check
from normstream.checkpoints.rescaling.changes import EpsChange
from normstream.checkpoints.rescaling.check import Clamp, clamps_of, power_for
from normstream.checkpoints.rescaling.plan import Planner
from normstream.checkpoints.rescaling.rescale import apply, choose_power, rescale, set_eps
from normstream.inspect.anatomy import Anatomy, Call, LayerSite, NormSite, StackAnatomy, Sublayer
from normstream.inspect.probing.norm_facts import find_norms
from normstream.inspect.probing.probe import anatomy_of
from normstream.norms import RMSNorm

# FR-12


class WritingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.write = RMSNorm(2, eps=1e-6), nn.Linear(2, 2)
        nn.init.zeros_(self.write.weight)
        self.write.bias.data = torch.tensor([32768.0, 0.0])

    def forward(self, h: Tensor) -> Tensor:
        return h + self.write(self.norm(h))


class OneWrite(nn.Module):
    """A stream of two channels, one write to it, and the norm that reads the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(torch.tensor([[49152.0, 32768.0]]))
        self.layers = nn.ModuleList([WritingLayer()])
        self.norm = RMSNorm(2, eps=1e-6)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(self.layers[0](self.embedding(input_ids)))


def anatomy_of_one_write(model: OneWrite, inputs: dict[str, Any]) -> Anatomy:
    facts = find_norms(model, inputs)
    read, write, final = Call("layers.0.norm"), Call("layers.0.write"), Call("norm")
    sublayer = Sublayer("layers.0.ffn", "ffn", 0, write, write, 1.0, (read,), read, None, None, (write,), (write,))
    norms = (
        NormSite(read, "pre", ("ffn",), (sublayer.name,), 0, "stream", facts["layers.0.norm"]),
        NormSite(final, "final", (), (), None, "stream", facts["norm"]),
    )
    layer = LayerSite(0, Call("layers.0"), 1.0, (sublayer,))
    return Anatomy((StackAnatomy("main", (layer,), norms, (Call("embedding"),), 1.0),), None, False, None)


def test_fr_12_stream_that_overflows_with_one_write() -> None:
    model, inputs = OneWrite(), {"input_ids": torch.zeros(1, 1, dtype=torch.int64)}
    result = rescale(model, inputs, k=2, anatomy=anatomy_of_one_write(model, inputs), per_norm_eps=True)
    expected = torch.tensor([1.3130643, 0.5252257])
    torch.testing.assert_close(model(**inputs)[0, 0], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(result.model(**inputs)[0, 0], expected, atol=1e-6, rtol=0)
    assert not copy.deepcopy(model).half()(**inputs).isfinite().all()
    half: Any = copy.deepcopy(result.model).half()
    assert half.layers[0](half.embedding(inputs["input_ids"])).tolist() == [[[20480, 8192]]]
    torch.testing.assert_close(half(**inputs)[0, 0].float(), expected, atol=1e-3, rtol=0)
    assert (result.report.fp16_before.is_finite, result.report.fp16_after.is_finite) == (False, True)


def test_fr_12_eps_of_a_reader() -> None:
    holder = nn.ModuleDict({"norm": RMSNorm(4, eps=1e-6, gain="none")})
    row = torch.full((1, 4), 1e-3) / 4
    assert holder["norm"](row)[0, 0].item() == pytest.approx(0.2425356, abs=1e-6)
    set_eps(holder, EpsChange("norm", 1e-6, -4))
    assert holder["norm"](row)[0, 0].item() == pytest.approx(0.7071068, abs=1e-6)


@pytest.mark.parametrize("sandwich", [False, True])
def test_fr_12_four_layers_in_float64(sandwich: bool) -> None:
    model = Toy(sandwich=sandwich, n_layers=4).double()
    anatomy = anatomy_of(model, TOKENS)
    result = rescale(model, TOKENS, k=4, anatomy=anatomy, per_norm_eps=True)
    torch.testing.assert_close(result.model(**TOKENS), model(**TOKENS), atol=1e-10, rtol=0)
    assert [row.before / row.after for row in result.report.peaks] == [16.0] * 4
    assert [change.before for change in result.plan.eps] == [pytest.approx(1e-6, rel=1e-3)] * 9
    alone = apply(model, Planner(model, TOKENS, anatomy, 4, frozenset()).plan())
    assert difference(exact_answer(alone, TOKENS), exact_answer(model, TOKENS)) > 1e-2


def test_fr_12_second_time() -> None:
    once = rescale(Toy(), TOKENS, k=4, anatomy=anatomy_of_toy(), per_norm_eps=True).model
    with pytest.raises(ValueError, match=r"rescaled by 2\^4 already"):
        rescale(once, TOKENS, k=2, per_norm_eps=True)
    once = rescale(tiny_model("llama"), k=4).model
    with pytest.raises(ValueError, match=r"rescaled by 2\^4 already"):
        rescale(once, k=2)


def test_the_given_model_stays() -> None:
    model, anatomy = Toy(sandwich=True), anatomy_of_toy(sandwich=True)
    before = copy.deepcopy(model.state_dict())
    rescale(model, TOKENS, k=4, anatomy=anatomy, per_norm_eps=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.norm.eps == 1e-6


class Experts(nn.Module):
    """The router chooses the first expert for every token; the list has three."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(FeedForward(16, F.silu) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


def test_experts_that_no_token_chose_are_scaled_too() -> None:
    model = Toy()
    layer: Any = model.layers[1]
    layer.feed_forward = Experts()
    new: Any = rescale(model, TOKENS, k=4, per_norm_eps=True).model
    old = layer.feed_forward.state_dict()
    for name, tensor in new.layers[1].feed_forward.state_dict().items():
        assert torch.equal(tensor, old[name] / 16 if ".down." in name else old[name])


def test_other_matrices_that_do_not_run_are_named() -> None:
    model = Toy()
    model.layers[0].idle = nn.Linear(16, 16)
    report = rescale(model, TOKENS, k=4, per_norm_eps=True).report
    assert any("layers.0.idle" in note for note in report.notes)


# Which power


@pytest.mark.parametrize(("peak", "headroom", "k"), [(2.5e5, 16, 6), (65504, 1, 0), (65505, 1, 1), (65504 * 4, 2, 3)])
def test_smallest_power_that_leaves_the_headroom(peak: float, headroom: float, k: int) -> None:
    assert power_for(peak, headroom) == k
    assert peak / 2**k * headroom <= 65504
    assert k == 0 or peak / 2 ** (k - 1) * headroom > 65504


def test_power_from_the_stream() -> None:
    model = Toy()
    with torch.no_grad():
        model.layers[1].feed_forward.down.bias[5] = 3e5  # type: ignore[index, union-attr]
    report = rescale(model, TOKENS, anatomy=anatomy_of_toy(), per_norm_eps=True).report
    assert report.k == 7  # 3e5 x 16 / 65,504 = 73.3
    assert report.headroom == pytest.approx(65504 / 3e5 * 128, rel=1e-3)


def test_nothing_to_do() -> None:
    with pytest.raises(ValueError, match="nothing to do"):
        rescale(Toy(), TOKENS, anatomy=anatomy_of_toy(), per_norm_eps=True)
    with pytest.raises(ValueError, match="nothing to do"):
        choose_power(0.0, 16)


def test_stream_that_overflows_already() -> None:
    with pytest.raises(ValueError, match="float32"):
        choose_power(math.inf, 16)


# What is refused


def test_clamp_on_the_stream() -> None:
    """A bound far above the peak changes nothing on this text, and does on another."""
    for bound in (1e-3, 1e6):
        model = Toy(clamp=bound)
        assert len(clamps_of(model, TOKENS)) == 2
        with pytest.raises(ValueError, match="clamps values on the stream"):
            rescale(model, TOKENS, k=4, anatomy=anatomy_of_toy(), per_norm_eps=True)


@pytest.mark.parametrize("ratio", [0.5, 0.5 + 1e-7])
def test_clamp_when_the_stream_is_halved(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may leave a little more than a half."""
    peaks = iter([[Clamp(8.0, False)], [Clamp(8.0 * ratio, False)]])
    monkeypatch.setattr(check, "clamps_of", lambda *_: next(peaks))
    with pytest.raises(ValueError, match="clamps values on the stream"):
        check.refuse_clamps(Toy(), Toy(), TOKENS)


def test_stream_that_starts_at_unit_length() -> None:
    with pytest.raises(ValueError, match="cannot be scaled"):
        rescale(Toy(unit_start=True), TOKENS, k=4, per_norm_eps=True)


def test_update_of_unit_length() -> None:
    model = Toy(sandwich=True)
    model.layers[1].after[0] = RMSNorm(16, eps=1e-6, gain="none")  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=r"layers\.1\.after\.0 puts a vector of unit length on the stream"):
        rescale(model, TOKENS, k=4, per_norm_eps=True)


class RawReader(nn.Module):
    """Reads the stream through a non-linearity, and no matrix in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, h: Tensor) -> Tensor:
        return self.out(h.tanh())


def test_nonlinear_reader_without_a_matrix() -> None:
    model = Toy()
    layer: Any = model.layers[1]
    layer.read[1], layer.feed_forward = nn.Identity(), RawReader()
    with pytest.raises(ValueError, match="function would not be kept"):
        rescale(model, TOKENS, k=4, per_norm_eps=True)


def test_quantised_weights() -> None:
    model = Toy()
    model.head.weight = nn.Parameter(torch.zeros(50, 16, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"head\.weight is quantised"):
        rescale(model, TOKENS, k=4, anatomy=anatomy_of_toy(), per_norm_eps=True)


def test_eps_that_no_config_holds() -> None:
    with pytest.raises(ValueError, match="fixed in the model's code"):
        rescale(tiny_model("olmo"), k=6)
    with pytest.raises(ValueError, match="fixed in the code of OlmoLayerNorm"):
        rescale(tiny_model("olmo"), k=6, per_norm_eps=True)


def test_one_eps_that_has_to_be_two() -> None:
    """BERT's config has one eps for the stream's norms and for one behind a GELU, which nothing linear feeds."""
    with pytest.raises(ValueError, match=r"cls\.predictions\.transform\.LayerNorm"):
        rescale(tiny_model("bert"), k=6)
