"""Norms whose per-token statistic can be exchanged for a fixed one, a path at a time: ffn, q and k, v, final.

    real    n = (x - mean(x)) / s(x)      s(x) = sqrt(mean of squares + eps), of each token
    fixed   n = (x - mean(x)) / sigma     sigma: one number for the first position, one for all others

(Without the mean for RMSNorm.) Gain and bias stay, and stay trainable. The norm before attention feeds two paths;
while one of them is fixed and the other is not, the rows of q and k and those of v are multiplied with different
inputs. Which rows are v's is found by value: attention is linear in them and in no others.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normstream.checkpoints.rescaling.feeders import linear_rows, make_bench, present
from normstream.checkpoints.surgery.norm_readers import norm_parameters, readers_of
from normstream.inspect.anatomy import Anatomy, NormFacts, NormSite, Sublayer
from normstream.inspect.hooks import Recorder, Run

Route = Literal["ffn", "qk", "v", "final"]
"""What a norm's output is used for."""
HUGE_EPS = 1e12
"""An eps that swamps every statistic: sqrt(s^2 + eps) = 1e6 whatever the token."""


@dataclass
class _Norm:
    path: str
    layer: int | None
    facts: NormFacts
    gain: str
    bias: str | None
    routes: frozenset[Route]
    readers: dict[str, dict[Route, Tensor | None]] = field(default_factory=dict)
    """Readers of a norm of several routes: which rows of their output belong to a route, None for all."""
    fixed: set[Route] = field(default_factory=set)
    first: float = 1.0
    """Statistic of the first position, and of special tokens in v."""
    others: float = 1.0
    input: Tensor | None = None
    seen: list[Tensor] = field(default_factory=list)


class FixableNorms:
    """Hooks on the norms of a Pre-Norm model, from entering a ``with`` to leaving it.

    Args:
        model: a decoder; it is only hooked, its parameters stay its own.
        inputs: to look at which matrices read what.
        anatomy: its wiring.

    Raises:
        ValueError: if a norm is neither a pre norm nor the final one or has no gain, or if values cannot be told from
            queries and keys.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy) -> None:
        self.model, self.n_layers = model, len(anatomy.stacks[0].layers)
        self.special_BT: Tensor | None = None
        """Where the tokens are special; they take the first position's statistic in v."""
        self.keeps_special = self.keeps_first = True
        self._measuring = False
        self._handles: list[Any] = []
        check_pre_norm(anatomy)
        with Recorder(model) as recorder:
            run = recorder.run(inputs, keep=frozenset(recorder.modules))
            self.norms = [_look_at(recorder, run, anatomy, site) for site in anatomy.norms]

    def __enter__(self) -> "FixableNorms":
        for norm in self.norms:
            hook = self._after_norm(norm)
            self._handles.append(self.model.get_submodule(norm.path).register_forward_hook(hook))
            for path, rows in norm.readers.items():
                reader = self.model.get_submodule(path)
                hook = self._after_reader(norm, rows)
                self._handles.append(reader.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    @property
    def n_real(self) -> int:
        """Norms that still use a statistic of their token, on some route."""
        return sum(norm.fixed != norm.routes for norm in self.norms)

    def measure(self, passes: Iterable[Callable[[], Any]]) -> None:
        """Takes the mean statistic over some forward passes as the one to be fixed."""
        self._measuring = True
        with torch.no_grad():
            for forward in passes:
                forward()
        self._measuring = False
        for norm in self.norms:
            norm.first = torch.cat([seen[:, 0].flatten() for seen in norm.seen]).mean().item()
            norm.others = torch.cat([seen[:, 1:].flatten() for seen in norm.seen]).mean().item()
            norm.seen.clear()

    def fix(self, route: Route, layer: int | None = None) -> None:
        """Fixes the statistic of one route in one layer (None: of the final norm)."""
        for norm in self.norms:
            if route in norm.routes and norm.layer == layer:
                norm.fixed.add(route)

    def reset(self) -> None:
        """Gives every norm its token's statistic back."""
        self.keeps_special = self.keeps_first = True
        for norm in self.norms:
            norm.fixed.clear()

    def plain_gains(self) -> dict[str, Tensor]:
        """Gains, by parameter name, with which norms of eps ``HUGE_EPS`` compute what all fixed ones do."""
        gains = {}
        for norm in self.norms:
            name = f"{norm.path}.{norm.gain}"
            stored = self.model.get_parameter(name).detach()
            is_shifted = norm.facts.gain == "one_plus_w"
            effective = (stored + 1 if is_shifted else stored) * (HUGE_EPS**0.5 / norm.others)
            gains[name] = effective - 1 if is_shifted else effective
        return gains

    def _fixed(self, norm: _Norm, x: Tensor, route: Route) -> Tensor:
        sigma = torch.full(x.shape[:-1], norm.others, dtype=x.dtype, device=x.device)
        if self.keeps_first:
            sigma[:, 0] = norm.first
        if self.keeps_special and route == "v" and self.special_BT is not None:
            sigma = sigma.masked_fill(self.special_BT, norm.first)
        centred = x - x.mean(-1, keepdim=True) if norm.facts.kind == "layer" else x
        gain = self.model.get_parameter(f"{norm.path}.{norm.gain}")
        output = centred / sigma[..., None] * (1 + gain if norm.facts.gain == "one_plus_w" else gain)
        return output if norm.bias is None else output + self.model.get_parameter(f"{norm.path}.{norm.bias}")

    def _after_norm(self, norm: _Norm) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            x = args[0]
            if self._measuring:
                centred = x - x.mean(-1, keepdim=True) if norm.facts.kind == "layer" else x
                norm.seen.append((centred.square().mean(-1) + (norm.facts.eps or 0.0)).sqrt())
            norm.input = x if norm.readers else None
            if not norm.readers and norm.fixed:
                return self._fixed(norm, x, next(iter(norm.routes)))
            return None

        return hook

    def _after_reader(self, norm: _Norm, rows: Mapping[Route, Tensor | None]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            for route, mask in rows.items():
                if route in norm.fixed and norm.input is not None:
                    z = self._fixed(norm, norm.input, route)
                    fixed = module.forward(*_with_input(args, z), **kwargs)
                    output = fixed if mask is None else torch.where(mask, fixed, output)
            return output

        return hook


def _with_input(args: tuple[Any, ...], z: Tensor) -> tuple[Any, ...]:
    """A matrix module's arguments with another input; experts get the tokens of all samples in a row."""
    return (z.reshape(args[0].shape), *args[1:])


def check_pre_norm(anatomy: Anatomy) -> None:
    """Raises ValueError unless a model is one stack with pre norms and a final norm, each run once, and no others."""
    if len(anatomy.stacks) != 1:
        raise ValueError(f"expected a decoder of one stack, got {', '.join(stack.name for stack in anatomy.stacks)}")
    for site in anatomy.norms:
        if site.place not in ("pre", "final"):
            raise ValueError(
                f"{site.call} is no pre norm and no final norm ({site.place}); this works on Pre-Norm only"
            )
        if site.facts.gain not in ("plain", "one_plus_w"):
            raise ValueError(f"{site.call} has no gain that a fixed statistic could go into")
    paths = [site.call.path for site in anatomy.norms]
    if len(set(paths)) < len(paths):
        raise ValueError("norms are shared between layers; each needs a statistic of its own")


def _look_at(recorder: Recorder, run: Run, anatomy: Anatomy, site: NormSite) -> _Norm:
    record = run.records[site.call]
    gain, bias = norm_parameters(recorder, record)
    if gain is None:
        raise ValueError(f"{site.call} has no gain that a fixed statistic could go into")
    if site.place == "final":
        return _Norm(site.call.path, None, site.facts, gain, bias, frozenset({"final"}))
    mixers = [s for s in anatomy.stacks[0].sublayers if s.pre_norm == site.call and s.kind == "mixer"]
    readers: dict[str, dict[Route, Tensor | None]] = {}
    for path in readers_of(recorder, run, record) if mixers else ():
        mixer = next((mixer for mixer in mixers if path in [reader.path for reader in mixer.readers]), None)
        readers[path] = {"ffn": None} if mixer is None else _routes_of(recorder, run, anatomy, mixer, path)
    routes: set[Route] = {route for rows in readers.values() for route in rows} or {"ffn"}
    return _Norm(site.call.path, site.layer, site.facts, gain, bias, frozenset(routes), readers)


def _routes_of(
    recorder: Recorder, run: Run, anatomy: Anatomy, mixer: Sublayer, path: str
) -> dict[Route, Tensor | None]:
    """Which rows of a matrix make queries and keys, and which make values."""
    if len(mixer.writers) != 1:
        raise ValueError(f"{mixer.name} has no single output matrix, so values cannot be told from queries and keys")
    bench = make_bench(recorder, run.records[anatomy.stacks[0].layers[mixer.layer].call])
    source = next(reader for reader in mixer.readers if reader.path == path)
    values = linear_rows(bench, source, mixer.writers[0])
    if values is None:
        return {"qk": None}
    if values.rows is None:
        return {"v": None}
    mask = torch.zeros(present(run.output(source), source).shape[-1], dtype=torch.bool)
    mask[list(values.rows)] = True
    return {"qk": ~mask, "v": mask}
