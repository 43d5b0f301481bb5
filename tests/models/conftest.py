"""Comparing a model with the numbers that official code gave: weights, outputs, hidden states, gradients.

A test names a golden file of ``tests/golden``, builds the model by its public configuration and says, parameter by
parameter, where the official weight is. Nothing else is said: no equation, no number. ::

    CASES = {"NAME": (DecoderConfig(placement="pre", ...), {"layers.0.attention.wq.weight": "att_proj.weight[0:32]"})}

    @pytest.fixture(scope="module", params=CASES)
    def case(request, golden_case):
        return golden_case(request.param, *CASES[request.param])

    def test_the_map_is_complete(case):
        case.check_map()

Our names are those of ``named_parameters``; so that the map need not know which junction makes a sublayer's input,
``layers.2.before_attention`` stands for the junction whose read belongs to that sublayer, and ``after_layers`` for the
last junction. An official name can be followed, in this order, by

    [0:32]   only these rows; [:,0:3] only these columns (axes of length 1 are dropped before)
    .T       transposed
    .flat    all axes but the first as one (a convolution's weight, ours being that of a Linear)
    + 1      our parameter is the official one plus this number (codes that store a gain as its offset from 1)
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from normstream.models import DecoderConfig, DecoderLM

FOLDER = Path(__file__).parents[1] / "golden"

Pick = Callable[[tuple[Any, ...], Any], Tensor]
"""A tensor from what a module received and what it returned."""
Run = Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]
"""Model and official inputs to outputs by their official names."""


class Source(NamedTuple):
    """Where one of our parameters is in the official weights."""

    name: str
    index: tuple[slice, ...]
    transpose: bool
    flat: bool
    offset: float

    @staticmethod
    def parse(text: str) -> "Source":
        match = re.fullmatch(r"(.+?)(?:\[([\d:,]+)\])?(\.T)?(\.flat)?(?: \+ (\S+))?", text)
        assert match is not None, text
        name, index, transpose, flat, offset = match.groups()
        axes = [axis.split(":") for axis in (index or ":").split(",")]
        slices = tuple(slice(int(first or 0), int(last) if last else None) for first, last in axes)
        return Source(name, slices, transpose is not None, flat is not None, float(offset or 0))

    def part(self, official: Tensor) -> Tensor:
        """The part that is ours, without axes of length 1."""
        part = torch.atleast_1d(official.squeeze())[self.index]
        part = part.flatten(1) if self.flat else part
        return (part.T if self.transpose else part).squeeze()

    def like(self, official: Tensor, ours: Tensor) -> Tensor:
        """The part, in the shape of our parameter: axes of length 1 may come and go, nothing else is reshaped."""
        part = self.part(official)
        assert part.shape == ours.squeeze().shape, f"{self.name}: {tuple(part.shape)}, ours {tuple(ours.shape)}"
        return part.reshape(ours.shape)


def run_decoder(model: DecoderLM, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    (tokens,) = inputs.values()
    hidden = model.hidden(tokens)
    return {"final_hidden": hidden, "logits": model(tokens)}


@dataclass
class Case:
    """A golden file and a model of ours that carries its weights."""

    name: str
    golden: dict[str, Tensor]
    sources: dict[str, Source]
    model: Any
    run: Run

    @property
    def inputs(self) -> dict[str, Tensor]:
        return self._group("input.")

    def _group(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in self.golden.items() if name.startswith(prefix)}

    def _facts(self) -> dict[str, Any]:
        return json.loads((FOLDER / f"{self.name}.json").read_text())

    def _batch_first(self, tensor: Tensor) -> Tensor:
        """fairseq has time before batch; the lengths differ in every golden file."""
        lengths = next(iter(self.inputs.values())).shape[:2]
        return tensor.transpose(0, 1) if tensor.ndim == 3 and tensor.shape[:2] == lengths[::-1] else tensor

    def check_map(self) -> None:
        """Each official entry is read once and each parameter of ours written once."""
        assert sorted(name for name, _ in self.model.named_parameters()) == sorted(self.sources)
        official = self._group("param.")
        used: dict[str, list[int]] = {name: [] for name in official}
        for source in self.sources.values():
            tensor = official[source.name]
            used[source.name] += source.part(torch.arange(tensor.numel()).reshape(tensor.shape)).flatten().tolist()
        for name, entries in used.items():
            assert sorted(entries) == list(range(official[name].numel())), name
        facts = self._facts()
        without = set(facts["no_gradient"] + facts.get("gradient_left_out_for_size", []))
        assert set(official) == set(self._group("grad.")) | without

    def check_outputs(self) -> None:
        with torch.no_grad():
            outputs = self.run(self.model, self.inputs)
        for name, wanted in self._group("output.").items():
            assert_close(outputs[name], self._batch_first(wanted), name)

    def check_gradients(self, tolerance: float = 1e-7) -> None:
        """Every gradient, relative to the largest entry; those that are zero up to rounding, absolutely."""
        facts = self._facts()
        (output,) = re.findall(r"'output\.(\w+)'", facts["loss"])
        self.model.zero_grad()
        outputs = self.run(self.model, self.inputs)
        loss = (self._batch_first(self.golden["loss.weight"]) * outputs[output]).sum()
        assert abs(loss.item() - self.golden["loss.value"].item()) < 1e-9
        loss.backward()
        parameters, official = dict(self.model.named_parameters()), self._group("grad.")
        for name, source in self.sources.items():
            if source.name in facts["no_gradient"] + facts.get("gradient_left_out_for_size", []):
                continue
            ours, wanted = parameters[name], official[source.name]
            grad = torch.zeros_like(ours) if ours.grad is None else ours.grad
            error = (grad - source.like(wanted, ours)).abs().max().item()
            scale = 1.0 if source.name in facts["zero_gradient"] else wanted.abs().max().item()
            assert error <= tolerance * scale, f"{name}: gradient is off by {error:.1e} of {scale:.1e}"

    def check_hidden(self, points: Mapping[str, tuple[str, Pick]] | None = None, leave_out: str = "nothing") -> None:
        """Every ``hidden.*`` tensor but those whose name matches ``leave_out``.

        The usual names are known (see ``usual_points``); ``points`` adds or replaces some, each as the name of a
        module of ours and what to pick from its arguments and its result.
        """
        wanted = {n: t for n, t in self._group("hidden.").items() if not re.fullmatch(leave_out, n)}
        where = usual_points(self.model) | dict(points or {})
        seen: dict[str, Tensor] = {}
        hooks = []
        for name in wanted:
            module, pick = where[name.removeprefix("encoder.")]
            target = self.model.get_submodule(full_name(module, self.model))
            hooks.append(target.register_forward_hook(keep(seen, name, pick)))
        with torch.no_grad():
            self.run(self.model, self.inputs)
        for hook in hooks:
            hook.remove()
        assert len(wanted) >= 2 * len(self.model.layers)
        for name, tensor in wanted.items():
            assert_close(seen[name], self._batch_first(tensor), name)


def assert_close(ours: Tensor, wanted: Tensor, name: str) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-9, msg=lambda text: f"{name}: {text}")


def keep(seen: dict[str, Tensor], name: str, pick: Pick) -> Callable[..., None]:
    return lambda module, args, output: seen.__setitem__(name, pick(args, output))


def stream(index: int) -> Pick:
    """A stream of what a layer or a junction returns, (state, z)."""
    return lambda args, output: output[0][index]


def usual_points(model: Any) -> dict[str, tuple[str, Pick]]:
    """What most golden files record: the embedding, the streams after each block, inputs and updates of sublayers."""
    points: dict[str, tuple[str, Pick]] = {"embed": ("before_layers", lambda args, output: args[1])}
    for i in range(len(model.layers)):
        layer = f"layers.{i}"
        points |= {f"{i}": (layer, stream(0)), f"{i}.x": (layer, stream(0)), f"{i}.y": (layer, stream(1))}
        for ours, official in (("attention", "attn"), ("feed_forward", "ffn")):
            points[f"{i}.{official}_input"] = (f"{layer}.{ours}", lambda args, output: args[0])
            points[f"{i}.{official}_update"] = (f"{layer}.{ours}", lambda args, output: output)
    return points


def full_name(name: str, model: Any) -> str:
    """``layers.2.before_attention...`` and ``after_layers...`` by the name of the junction that they stand for."""
    layers = getattr(model, "layers", ())
    if name.startswith("after_layers"):
        last = len(layers) - 1
        return name.replace("after_layers", f"layers.{last}.after_{layers[last].kinds[-1]}", 1)
    match = re.fullmatch(r"layers\.(\d+)\.before_([a-z_]+)(.*)", name)
    if match is None:
        return name
    layer, kind, rest = int(match[1]), match[2], match[3]
    place = layers[layer].kinds.index(kind)
    if place > 0:
        return f"layers.{layer}.after_{layers[layer].kinds[place - 1]}{rest}"
    return f"layers.{layer - 1}.after_{layers[layer - 1].kinds[-1]}{rest}" if layer > 0 else f"before_layers{rest}"


def load_case(name: str, config: DecoderConfig | nn.Module, names: Mapping[str, str], run: Run = run_decoder) -> Case:
    """The golden file ``name`` and the model in float64 with its weights.

    Args:
        name: of the file.
        config: configuration of a decoder, or any model.
        names: our parameters to the official ones; see the module's docstring.
        run: for a model that is no decoder.
    """
    golden = load_file(FOLDER / f"{name}.safetensors")
    model: Any = DecoderLM(config) if isinstance(config, DecoderConfig) else config
    model = model.double().eval()
    sources = {full_name(ours, model): Source.parse(official) for ours, official in names.items()}
    assert len(sources) == len(names), "two names for one parameter of ours"
    parameters = dict(model.named_parameters())
    missing, unknown = set(parameters) - set(sources), set(sources) - set(parameters)
    assert not missing | unknown, f"ours, not in the map: {sorted(missing)}; in the map, not ours: {sorted(unknown)}"
    with torch.no_grad():
        for ours, source in sources.items():
            parameter = parameters[ours]
            parameter.copy_(source.like(golden[f"param.{source.name}"], parameter) + source.offset)
    return Case(name, golden, sources, model, run)


@pytest.fixture(scope="session")
def golden_case() -> Callable[..., Case]:
    """``load_case``: golden_case(name, config or model, names, run=...) -> Case."""
    return load_case
