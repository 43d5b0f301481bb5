"""Finding the norms of any model by what modules compute, and measuring each of them; no class or module name is read.

A norm module maps ``x`` to ``G * N(x) + b``: N takes the mean square (and, for a layer norm, the mean) over groups of
``width`` neighbours on one axis, G and b do not depend on x. Everything follows from calls of a copy of the module,
whose parameters are drawn anew: gains that are zero at the start, or one, would hide what is looked for.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Gain, NormFacts
from normstream.lab.runner import is_out_of_memory

Cast = Literal["before_gain", "after_gain", "float32", "unknown"]
LARGE = 2.0**10
"""A scale at which no eps matters."""
SMALLEST = 2.0**-60
"""A norm whose eps does not show at this scale of the input has none; its square is still a normal float32."""
TOLERANCE = 1e-3
"""Relative: many norms compute in float32 whatever they are given."""


@dataclass(frozen=True)
class _Recorded:
    """The first call of a module: its arguments, and where among them the input is."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: int | str
    shape: torch.Size


@dataclass(frozen=True)
class _Norm:
    """N: on which axis of the input, over how many neighbours, with or without the mean."""

    kind: Literal["rms", "layer"]
    axis: int
    width: int

    def __call__(self, x: Tensor, eps: float = 0.0) -> Tensor:
        grouped = x.movedim(self.axis, -1).unflatten(-1, (-1, self.width))
        if self.kind == "layer":
            grouped = grouped - grouped.mean(-1, keepdim=True)
        normed = grouped * (grouped.square().mean(-1, keepdim=True) + eps).rsqrt()
        return normed.flatten(-2).movedim(-1, self.axis)


@torch.random.fork_rng(devices=[])  # a model in training mode draws dropout
def find_norms(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, NormFacts]:
    """Every norm module that runs in ``model(**inputs)``, by its path in ``model.named_modules()``.

    Of a norm inside another (a wrapper, a norm with its affine map in a module of its own) the innermost counts. Norms
    that take a second tensor (a gate) are measured with ones in its place. The model is not changed.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, eps=1e-3), nn.Tanh())
    >>> facts = find_norms(model, {"input": torch.randn(5, 6)})
    >>> facts["1"].kind, facts["1"].gain, facts["1"].has_bias, round(facts["1"].eps, 5), facts["1"].cast
    ('layer', 'plain', True, 0.001, 'after_gain')
    """
    found = {}
    for path, (module, recorded) in _record(model, inputs).items():
        facts = _measure(path, module, recorded)
        if facts is not None:
            found[path] = facts
    return {path: facts for path, facts in found.items() if not any(_is_inside(other, path) for other in found)}


def _is_inside(path: str, of: str) -> bool:
    return path.startswith(f"{of}.") if of else bool(path)


# Recording --------------------------------------------------------------------------------------------------------


def _record(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, tuple[nn.Module, _Recorded]]:
    """The modules that could be norms, judged by shapes: no matrices inside, and as much comes out as went in."""
    records: dict[str, tuple[nn.Module, _Recorded]] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            key = _input_key(args, kwargs)
            output = _first(output)
            if path in records or key is None or not isinstance(output, Tensor):
                return
            x = args[key] if isinstance(key, int) else kwargs[key]
            if x.shape == output.shape and x.ndim > 0 and _is_elementwise(module, x.shape):
                records[path] = module, _Recorded(args, kwargs, key, x.shape)

        return hook

    # The same module under two names is recorded under the first.
    handles = [m.register_forward_hook(keep(path), with_kwargs=True) for path, m in model.named_modules()]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return records


def _first(output: Any) -> Any:
    """The normed tensor where a norm gives back more (a quantisation scale, normed keys beside normed queries)."""
    return output[0] if isinstance(output, tuple) and output else output


def _input_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Where the first floating-point tensor is."""
    for key, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor) and value.is_floating_point():
            return key
    return None


def _is_elementwise(module: nn.Module, shape: torch.Size) -> bool:
    """Whether no parameter is a matrix: each has one axis, or the input's last axes."""
    return all(
        parameter.ndim <= 1
        or (
            parameter.ndim <= len(shape)
            and all(size in (1, other) for size, other in zip(parameter.shape[::-1], reversed(shape), strict=False))
        )
        for parameter in module.parameters()
    )


# Measuring --------------------------------------------------------------------------------------------------------


class _Bench:
    """A copy of a module on its own, called with chosen inputs and all other arguments fixed."""

    def __init__(self, module: nn.Module, recorded: _Recorded, *, ones: bool, dtype: torch.dtype) -> None:
        self.module = copy.deepcopy(module).to(dtype).eval()
        self.recorded, self.ones, self.dtype = recorded, ones, dtype
        self.weights = [*self.module.parameters(), *(b for b in self.module.buffers() if b.numel() > 1)]
        self.generator = torch.Generator().manual_seed(0)
        self.set_weights(0.5, 1.5)

    def set_weights(self, low: float, high: float) -> None:
        """Draws gains and biases uniformly; float64 copies and bfloat16 ones get the same, bfloat16's, values."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in self.weights:
                if weight.is_floating_point():
                    drawn = low + (high - low) * torch.rand(weight.shape, generator=generator)
                    weight.copy_(drawn.to(torch.bfloat16))

    def draw(self) -> Tensor:
        return torch.randn(self.recorded.shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        args, kwargs = list(self.recorded.args), dict(self.recorded.kwargs)
        args = [self._fixed(value) for value in args]
        kwargs = {name: self._fixed(value) for name, value in kwargs.items()}
        if isinstance(self.recorded.key, int):
            args[self.recorded.key] = x.clone()
        else:
            kwargs[self.recorded.key] = x.clone()
        with torch.no_grad():
            return _first(self.module(*args, **kwargs))

    def odd(self, x: Tensor) -> Tensor:
        """(y(x) - y(-x)) / 2: without the bias."""
        return (self(x) - self(-x)) / 2

    def even(self, x: Tensor) -> Tensor:
        """(y(x) + y(-x)) / 2: the bias."""
        return (self(x) + self(-x)) / 2

    def _fixed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.ones_like(value, dtype=self.dtype) if self.ones else value.to(self.dtype)


def _measure(path: str, module: nn.Module, recorded: _Recorded) -> NormFacts | None:
    """What the module computes, or None if it is no norm; with its other arguments as they were, or else ones."""
    for ones in (False, True):
        bench = _Bench(module, recorded, ones=ones, dtype=torch.float64)
        try:
            norm = _find_norm(bench)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            return None  # runs with nothing but the model's own values, so it is not y = G N(x) + b
        if norm is not None:
            return _facts(path, module, recorded, bench, norm)
    return None


def _find_norm(bench: _Bench) -> _Norm | None:
    """N, once ``y = G N(x) + b`` has been shown to hold: G from one input predicts the output of another."""
    x, other = bench.draw(), bench.draw()
    odd = bench.odd(LARGE * x)
    if not _near(bench.odd(8 * LARGE * x), odd) or _near(bench.odd(LARGE * other), odd):
        return None
    if not _near(bench.even(x), bench.even(other)):
        return None
    norm = _find_group(bench, x)
    if norm is None or not _normalises(bench, norm(x)):
        return None
    gain = odd / norm(x)
    return norm if _near(gain * norm(other), bench.odd(LARGE * other)) else None


def _normalises(bench: _Bench, unit: Tensor) -> bool:
    """Whether inputs of ordinary size are normed too: a tanh is blind to scale, a clip works, at large scales only."""
    full = bench.odd(LARGE * unit)
    here = bench.odd(unit)
    if not _near(here * (full.norm() / here.norm()), full):
        return False
    return _eps(bench, unit) is not None or bool(bench.odd(unit / 32).norm() > 0.9 * full.norm())


def _find_group(bench: _Bench, x: Tensor) -> _Norm | None:
    """Changes one feature: the outputs that move share its statistic. Adds a constant to them: nothing moves in LN."""
    middle = tuple(size // 2 for size in x.shape)
    bumped = x.clone()
    bumped[middle] += x.numel() ** 0.5
    moved = (bench.odd(LARGE * bumped) - bench.odd(LARGE * x)).abs() > 1e-6
    axes = [axis for axis in range(x.ndim) if moved.movedim(axis, 0).flatten(1).any(1).sum() > 1]
    if len(axes) != 1:
        return None
    axis = axes[0] - x.ndim
    width = int(moved.sum())
    if x.shape[axis] % width:
        return None
    start = middle[axis] // width * width
    if not moved.movedim(axis, -1)[middle[:axis] + middle[x.ndim + axis + 1 :]][start : start + width].all():
        return None
    shifted = bench.odd(LARGE * (x + 1))
    return _Norm("layer" if _near(shifted, bench.odd(LARGE * x)) else "rms", axis, width)


def _near(a: Tensor, b: Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())


def _facts(path: str, module: nn.Module, recorded: _Recorded, bench: _Bench, norm: _Norm) -> NormFacts:
    eps = _eps(bench, norm(bench.draw()))
    return NormFacts(
        path=path,
        kind=norm.kind,
        has_bias=bool(bench.even(bench.draw()).abs().max() > TOLERANCE),
        eps=eps,
        cast=_cast(_Bench(module, recorded, ones=bench.ones, dtype=torch.bfloat16), bench, norm, eps or 0.0),
        gain=_gain(bench),  # last: changes the bench's weights
        width=norm.width,
        features=recorded.shape[norm.axis],
    )


def _eps(bench: _Bench, unit: Tensor) -> float | None:
    """eps inside the root: ``|y(s n)| / |y(large n)| = s / sqrt(s^2 + eps)`` for an n of unit size in every group.

    None where two scales disagree: the norm guards against zero in another way.
    """
    full = bench.odd(LARGE * unit)

    def at(scale: float) -> tuple[float, float]:
        ratio = float((bench.odd(scale * unit) * full).sum() / full.square().sum())
        return ratio, scale**2 * (ratio**-2 - 1) if ratio > 0 else 0.0

    scale = 1.0
    while scale > SMALLEST and at(scale)[0] > 0.9:
        scale /= 4
    if scale <= SMALLEST:
        return 0.0
    (_, here), (_, below) = at(scale), at(scale / 2)
    return here if abs(here - below) <= 0.01 * here else None


def _cast(bench: _Bench, exact: _Bench, norm: _Norm, eps: float) -> Cast:
    """Which order of rounding to bfloat16 and multiplying by the gain gives the module's bfloat16 output bit by bit."""
    x = bench.draw()
    output = bench(x)
    if output.dtype == torch.float32:
        return "float32"
    normed = norm(x.float(), eps)
    gain = (exact.odd(x.double()) / norm(x.double(), eps)).float()
    rounded = gain.bfloat16()  # 1 + w, where it is added in bfloat16
    bias = exact.even(x.double()).float()

    def match(expected: Tensor) -> float:
        return float((expected.bfloat16() == output).float().mean())

    after = max(match(normed * gain + bias), match(normed * rounded + bias))
    early = normed.bfloat16()
    before = max(match(early * rounded + bias.bfloat16()), match(early.float() * gain + bias))
    if max(after, before) < 0.98 or min(after, before) > 0.98:
        return "unknown"
    return "after_gain" if after > before else "before_gain"


def _gain(bench: _Bench) -> Gain:
    """What is left of the output with all weights 0, and what it becomes with all weights 1."""
    x = LARGE * bench.draw()
    drawn = bench.odd(x)
    bench.set_weights(0, 0)
    at_zero = bench.odd(x)
    bench.set_weights(1, 1)
    at_one = bench.odd(x)
    if _near(at_zero, drawn):
        return "none"
    if at_zero.norm() <= TOLERANCE * at_one.norm():
        return "plain"
    return "one_plus_w" if _near(at_one, 2 * at_zero) else "other"
