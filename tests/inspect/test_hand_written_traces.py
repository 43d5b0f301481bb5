"""Traces of small models written here, in which every tensor of the stream is known: the layers keep it themselves."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy, Call, LayerSite, NormFacts, NormSite, Place, StackAnatomy, Sublayer
from normstream.inspect.measures.stream_trace import Trace, check_identity, identity, trace
from normstream.norms import RMSNorm

DIM = 8
FACTS = NormFacts("", "rms", "plain", has_bias=False, eps=None, cast="unknown", width=DIM, features=DIM)
X = torch.randn(1, 5, DIM, generator=torch.Generator().manual_seed(3))


class Layer(nn.Module):
    """Two branches and three norms with random weights; ``seen`` gets the stream at every point."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.norm_1, self.norm_2, self.norm_3 = (RMSNorm(DIM, eps=1e-6) for _ in range(3))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.seen: list[Tensor] = []

    def keep(self, stream: Tensor) -> Tensor:
        self.seen.append(stream.clone())
        return stream


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x += self.one(self.norm_1(self.keep(x)))
        x += self.two(self.norm_2(self.keep(x)))
        return x


class InPlaceOnTheUpdate(Layer):
    def forward(self, x: Tensor) -> Tensor:
        update = self.one(self.norm_1(self.keep(x)))
        update += x
        x = self.keep(update)
        return self.two(self.norm_2(x)).add_(x)


class Skip(Layer):
    """``x <- 2 x + f(x)`` twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.keep(2 * self.keep(x) + self.one(self.norm_1(x)))
        return 2 * x + self.two(self.norm_2(x))


class LearnedSkip(Layer):
    """``x <- s * x + f(x)`` twice, with a factor for each channel."""

    scale = torch.linspace(-0.5, 2.0, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.keep(self.scale * self.keep(x) + self.one(self.norm_1(x)))
        return self.scale * x + self.two(self.norm_2(x))


class KeelLike(Layer):
    """``x <- N(3 x + f(x))`` twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.keep(self.norm_1(3 * self.keep(x) + self.one(x)))
        return self.norm_2(3 * x + self.two(x))


class Shortcut(Layer):
    """The second branch reads the stream first, but is added last; the first one reads and is added in between."""

    def forward(self, x: Tensor) -> Tensor:
        late = self.two(self.norm_2(self.keep(x)))
        x = x + self.one(self.norm_1(x))
        return x + late


class NormOfTheNext(Layer):
    """The norm on the stream stands at the start of the next layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_3(x)
        x = self.keep(self.keep(x) + self.one(x))
        return x + self.two(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x = layer(x)
        return x


def sublayer(call: Call, module: str, name: str, pre_norm: str | None = "", **changes: Any) -> Sublayer:
    """The branch ``module`` of a layer's call; the matrix is what reads, returns and writes."""
    inner = Call(f"{call.path}.{module}", call.index)
    norm = Call(f"{call.path}.{pre_norm or {'one': 'norm_1', 'two': 'norm_2'}[module]}", call.index)
    pre = None if pre_norm is None else norm
    parts: dict[str, Any] = {
        "name": name,
        "kind": "ffn",
        "layer": int(name.split(".")[1]),
        "output": inner,
        "update": inner,
        "multiplier": 1.0,
        "reads": (pre or inner,),
        "pre_norm": pre,
        "output_norm": None,
        "trunk_norm": None,
        "readers": (inner,),
        "writers": (inner,),
    }
    return Sublayer(**parts | changes)


def wired(*layers: LayerSite, norms: dict[Call, Place] | None = None) -> Anatomy:
    sites = tuple(NormSite(call, place, (), (), None, "stream", FACTS) for call, place in (norms or {}).items())
    return Anatomy((StackAnatomy("main", layers, sites, (), 1.0),), None, is_tied=False, logit_multiplier=None)


def two_in_a_row(call: Call, index: int, skip: float = 1.0, **changes: Any) -> LayerSite:
    names = (f"layers.{index}.ffn", f"layers.{index}.ffn_2")
    branches = (sublayer(call, "one", names[0], **changes), sublayer(call, "two", names[1], **changes))
    return LayerSite(index, call, skip, branches)


def traced(layer: Layer, anatomy: Anatomy) -> Trace:
    with torch.no_grad():
        found = trace(Model([layer]).eval(), {"x": X.clone()}, anatomy)
    check_identity(found)
    assert max(row.true for row in identity(found)) < 1e-5
    return found


@pytest.mark.parametrize("kind", [InPlace, InPlaceOnTheUpdate])
def test_in_place_additions(kind: type[Layer]) -> None:
    layer = kind()
    one, two = traced(layer, wired(two_in_a_row(Call("layers.0"), 0))).sublayers
    before, between = layer.seen
    torch.testing.assert_close(one.before["x"], before)
    torch.testing.assert_close(one.after["x"], between)
    torch.testing.assert_close(two.before["x"], between)
    torch.testing.assert_close(one.update["x"], layer.one(layer.norm_1(before)).detach())
    torch.testing.assert_close(two.input, layer.norm_2(between).detach())
    torch.testing.assert_close(two.after["x"], between + layer.two(layer.norm_2(between)).detach())


def test_a_skip_multiplier() -> None:
    layer = Skip()
    one, two = traced(layer, wired(two_in_a_row(Call("layers.0"), 0, skip=4.0))).sublayers
    torch.testing.assert_close(one.kept["x"], 2 * layer.seen[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(two.kept["x"], 2 * layer.seen[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.after["x"], layer.seen[1])


def test_a_learned_skip_scale() -> None:
    layer = LearnedSkip()
    one, two = traced(layer, wired(two_in_a_row(Call("layers.0"), 0, skip=0.7))).sublayers
    torch.testing.assert_close(one.kept["x"], layer.scale * layer.seen[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(two.kept["x"], layer.scale * layer.seen[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Skip, LearnedSkip])
def test_a_fitted_skip_does_not_hide_a_wrong_update(kind: type[Layer]) -> None:
    with pytest.raises(ValueError, match="not understood"):
        traced(kind(), wired(two_in_a_row(Call("layers.0"), 0, skip=4.0, multiplier=0.9)))


def test_a_skip_multiplier_before_a_norm_on_the_stream() -> None:
    layer = KeelLike()
    trunk: dict[Call, Place] = {Call("layers.0.norm_1"): "trunk", Call("layers.0.norm_2"): "trunk"}
    site = two_in_a_row(Call("layers.0"), 0, skip=9.0, pre_norm=None)
    one, two = traced(layer, wired(site, norms=trunk)).sublayers
    before, between = layer.seen
    torch.testing.assert_close(one.after["x"], 3 * before + layer.one(before).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(two.before["x"], between)
    torch.testing.assert_close(two.kept["x"], 3 * between, rtol=1e-5, atol=1e-5)


def test_a_sublayer_that_reads_early_and_is_added_late() -> None:
    layer, call = Shortcut(), Call("layers.0")
    late = sublayer(call, "two", "layers.0.other", parallel_to=("layers.0.ffn",))
    found = traced(layer, wired(LayerSite(0, call, 1.0, (late, sublayer(call, "one", "layers.0.ffn")))))
    for part in found.sublayers:
        torch.testing.assert_close(part.before["x"], layer.seen[0])
        torch.testing.assert_close(part.after["x"], layer.seen[0] + part.update["x"])


def test_a_norm_on_the_stream_at_the_start_of_the_layer() -> None:
    layer, call = NormOfTheNext(), Call("layers.0")
    first = sublayer(call, "one", "layers.0.ffn", pre_norm=None)
    site = LayerSite(0, call, 1.0, (first, sublayer(call, "two", "layers.0.ffn_2")))
    found = traced(layer, wired(site, norms={Call("layers.0.norm_3"): "embedding"}))
    torch.testing.assert_close(found.sublayers[0].before["x"], layer.seen[0])
    torch.testing.assert_close(found.sublayers[0].after["x"], layer.seen[1])
    torch.testing.assert_close(found.stacks[0].layers[0].before["x"], X)


def test_sublayers_of_which_no_module_reads_the_stream() -> None:
    """Matrices that are no modules (XLNet): what a sublayer reads is then the sum up to it."""
    layer = InPlace()
    one, two = traced(layer, wired(two_in_a_row(Call("layers.0"), 0, reads=()))).sublayers
    torch.testing.assert_close(one.before["x"], layer.seen[0])
    torch.testing.assert_close(two.before["x"], layer.seen[1])


def test_a_layer_that_runs_three_times() -> None:
    layer = InPlace()
    model = Model([layer] * 3)  # one module, three places
    sites = [two_in_a_row(Call("layers.0", index), index) for index in range(3)]
    with torch.no_grad():
        found = trace(model.eval(), {"x": X.clone()}, wired(*sites))
    check_identity(found)
    assert len(found.sublayers) == 6
    for part, seen in zip(found.sublayers, layer.seen, strict=True):
        torch.testing.assert_close(part.before["x"], seen)


class Constant(nn.Module):
    """A branch that returns [3, 4], a norm with gain 2 behind it or a multiplier."""

    def __init__(self, multiplier: float | None) -> None:
        super().__init__()
        self.branch = nn.Linear(2, 2)
        self.norm = RMSNorm(2, eps=0.0)
        self.multiplier = multiplier
        with torch.no_grad():
            self.branch.weight.zero_()
            self.branch.bias.copy_(torch.tensor([3.0, 4.0]))
            nn.init.constant_(self.norm.get_parameter("weight"), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.norm(self.branch(x)) if self.multiplier is None else self.multiplier * self.branch(x))


@pytest.mark.parametrize(
    ("multiplier", "expected"), [(None, [1.6970563, 2.2627417]), (0.22, [0.66, 0.88])], ids=["norm", "multiplier"]
)
def test_what_is_added_behind_a_norm_of_gain_2_and_behind_a_multiplier(
    multiplier: float | None, expected: list[float]
) -> None:
    call, branch = Call("layers.0"), Call("layers.0.branch")
    norm = Call("layers.0.norm") if multiplier is None else None
    part = Sublayer(
        "layers.0.ffn", "ffn", 0, branch, norm or branch, multiplier or 1.0, (branch,), None, norm, None, (), ()
    )
    found = trace(
        Model([Constant(multiplier)]).eval(), {"x": torch.zeros(1, 1, 2)}, wired(LayerSite(0, call, 1.0, (part,)))
    )
    check_identity(found)
    (seen,) = found.sublayers
    torch.testing.assert_close(seen.update["x"], torch.tensor([[expected]]))
    torch.testing.assert_close(seen.output, torch.tensor([[[3.0, 4.0]]]))
