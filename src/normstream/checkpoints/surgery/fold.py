"""Folding: a norm's gain and bias move into the matrices that read it, which leaves the function as it is.

    norm:    n * g + b                 becomes  n
    reader:  W z + c                   becomes  (W diag(g)) z + (c + W b)

That is exact only where every reader of the norm is a matrix and all of them are known: a pre norm (q, k and v; gate
and up; the router and all experts), the final norm before an untied head, the norm of a latent vector. It is refused
for a norm that stands on the residual stream or is added to it: there the gain acts on the stream too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normstream.checkpoints.precise import Float64, answer, check_finite, difference, in_float64, widened
from normstream.checkpoints.surgery.norm_readers import (
    Reader,
    along,
    changed_all,
    make_reader,
    norm_parameters,
    readers_of,
    unused_siblings,
)
from normstream.inspect.anatomy import Anatomy, NormFacts, NormSite
from normstream.inspect.hooks import Record, Recorder, Run
from normstream.inspect.inputs import make_inputs
from normstream.inspect.probing.probe import anatomy_of

TOLERANCE = 1e-10
"""Largest relative difference of the float64 logits that still counts as the same function."""
REASONS = {
    "trunk": "it stands on the residual stream: what it puts out is also what the next sum goes on with",
    "embedding": "it stands on the residual stream: what it puts out is also what the next sum goes on with",
    "output": "its output is added to the residual stream, no matrix reads it alone",
    "q": "its output makes attention scores, no matrix reads it",
    "k": "its output makes attention scores, no matrix reads it",
    "v": "its output is averaged by attention, no matrix reads it",
    "no_effect": "nothing that comes out depends on it for these inputs, so a fold could not be verified",
    "unknown": "the probe could not tell where it stands",
}
"""Places of norms that cannot be folded, and why."""


@dataclass(frozen=True)
class FoldedNorm:
    """A norm that has gain 1 and no bias now."""

    path: str
    readers: tuple[str, ...]
    """Modules whose matrices have its gain."""


@dataclass(frozen=True)
class FoldReport:
    """What was folded, what was not, and how far the model's answer moved."""

    folded: tuple[FoldedNorm, ...]
    refused: dict[str, str]
    """Why, by the path of the norm."""
    exact_error: float
    """Largest difference of the logits relative to the largest one, in float64 before anything is rounded."""
    error: float
    """The same in the model's own dtype."""


def fold(
    model: nn.Module,
    inputs: Mapping[str, Any] | None = None,
    anatomy: Anatomy | None = None,
    seed: int = 0,
) -> FoldReport:
    """Folds every norm of a model that can be folded, in place, and compares the logits.

    Products are taken in float64 and rounded once. A zero-centred gain ``1 + w`` ends as w = 0.

    Args:
        model: a model of transformers, or any that ``anatomy_of`` can probe.
        inputs: keyword arguments of its ``forward`` to compare logits on; None makes random tokens.
        anatomy: if it is known already.
        seed: of tokens and probe.

    Raises:
        ValueError: if no norm can be folded, saying why for each place; for a model whose answer is not finite.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    ...                      num_attention_heads=2, num_key_value_heads=1)
    >>> model = LlamaForCausalLM(config).eval()
    >>> _ = nn.init.uniform_(model.model.layers[0].input_layernorm.weight)
    >>> [norm.path for norm in fold(model).folded]
    ['model.layers.0.input_layernorm', 'model.layers.0.post_attention_layernorm', 'model.norm']
    """
    inputs = make_inputs(model, seed=seed) if inputs is None else inputs
    anatomy = anatomy_of(model, inputs, seed) if anatomy is None else anatomy
    check_finite(model, inputs)
    exact = in_float64(model)
    with torch.no_grad(), Float64():
        before = answer(exact, widened(inputs))
        folded, refused = _fold_all(exact, widened(inputs), anatomy, before)
        exact_error = difference(answer(exact, widened(inputs)), before)
    if not folded and not refused:
        raise ValueError("the model has no norm with a gain or a bias: there is nothing to fold")
    if not folded:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in _first_of_each(refused).items())
        raise ValueError(f"no norm of this model can be folded into the matrices behind it: {reasons}")
    rounded_before = answer(model, inputs)
    new = dict(exact.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(new[name])
    return FoldReport(tuple(folded), refused, exact_error, difference(answer(model, inputs), rounded_before))


@dataclass(frozen=True)
class _Plan:
    """What folding one norm takes."""

    path: str
    facts: NormFacts
    gain: str | None
    bias: str | None
    readers: tuple[Reader, ...]


def _fold_all(
    model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy, before: Tensor
) -> tuple[list[FoldedNorm], dict[str, str]]:
    plans, refused = _plan_all(model, inputs, anatomy)
    folded: list[FoldedNorm] = []
    for plan in plans:
        try:
            _fold_norm(model, inputs, plan, before)
            folded.append(FoldedNorm(plan.path, tuple(reader.path for reader in plan.readers)))
        except ValueError as error:
            refused[plan.path] = str(error)
    return folded, refused


def _plan_all(model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy) -> tuple[list[_Plan], dict[str, str]]:
    """Plans for the norms that have something to fold, and why some of them cannot be."""
    plans: list[_Plan] = []
    refused: dict[str, str] = {}
    by_path: dict[str, list[NormSite]] = {}
    for site in anatomy.norms:
        if site.facts.gain != "none" or site.facts.has_bias:
            by_path.setdefault(site.call.path, []).append(site)
    with Recorder(model) as recorder:
        run = recorder.run(inputs, keep=frozenset(recorder.modules))
        for path, sites in by_path.items():
            try:
                plans.append(_plan(recorder, run, sites))
            except ValueError as error:
                refused[path] = str(error)
    return plans, refused


def _plan(recorder: Recorder, run: Run, sites: list[NormSite]) -> _Plan:
    path, facts = sites[0].call.path, sites[0].facts
    if reason := next((REASONS[site.place] for site in sites if site.place in REASONS), None):
        raise ValueError(reason)
    if facts.gain == "other":
        raise ValueError("its gain is neither w nor 1 + w")
    calls = [record for record in run.records.values() if record.call.path == path]
    gain, bias = norm_parameters(recorder, calls[0])
    return _Plan(path, facts, gain, bias, tuple(_all_readers(recorder, run, calls)))


def _fold_norm(model: nn.Module, inputs: Mapping[str, Any], plan: _Plan, before: Tensor) -> None:
    """Folds one norm, or raises ValueError and leaves the model as it was."""
    targets = _folded_values(model, plan)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in targets:
        _check_alone(model, parameters[name], name)
    with changed_all([parameters[name] for name in targets], list(targets.values())):
        moved = difference(answer(model, inputs), before)
    if not moved <= TOLERANCE:
        raise ValueError(
            f"something besides {', '.join(reader.path for reader in plan.readers)} reads it: the logits would move by "
            f"{moved:.1e} of the largest one"
        )
    for name, value in targets.items():
        parameters[name].copy_(value)


def _all_readers(recorder: Recorder, run: Run, calls: list[Record]) -> list[Reader]:
    """The readers of every call of a norm; experts that no token chose are taken like their neighbours in the list.

    Raises:
        ValueError: if there are none, or if one of them reads something else as well.
    """
    found: dict[str, Record] = {}
    times: dict[str, int] = {}
    for norm in calls:
        for path, record in readers_of(recorder, run, norm).items():
            found.setdefault(path, record)
            times[path] = times.get(path, 0) + 1
    if not found:
        raise ValueError("no matrix reads it")
    ran = {path: sum(record.call.path == path for record in run.records.values()) for path in found}
    if other := next((path for path in found if ran[path] > times[path]), None):
        raise ValueError(f"{other} reads something else as well")
    readers = [make_reader(recorder, record) for record in found.values()]
    for reader in list(readers):
        siblings = unused_siblings(recorder, run, calls[0].call.path, reader.path)
        readers += [Reader(path, reader.matrices, reader.bias) for path in siblings]
    return readers


def _folded_values(model: nn.Module, plan: _Plan) -> dict[str, Tensor]:
    """New values of the norm's and its readers' parameters, by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    zero_centred = plan.facts.gain == "one_plus_w"
    values: dict[str, Tensor] = {}
    scale, shift = torch.ones(plan.facts.features, dtype=torch.float64), None
    if plan.gain is not None:
        stored = parameters[f"{plan.path}.{plan.gain}"]
        scale = (stored + 1 if zero_centred else stored).detach().flatten()
        values[f"{plan.path}.{plan.gain}"] = torch.zeros_like(stored) if zero_centred else torch.ones_like(stored)
    if plan.bias is not None:
        shift = parameters[f"{plan.path}.{plan.bias}"].detach().clone()
        values[f"{plan.path}.{plan.bias}"] = torch.zeros_like(shift)
    for reader in plan.readers:
        for name, axis in reader.matrices:
            weight = parameters[f"{reader.path}.{name}"].detach()
            values[f"{reader.path}.{name}"] = weight * along(scale, weight, axis)
            if shift is not None and shift.any():
                if reader.bias is None:
                    raise ValueError(f"it has a bias and {reader.path} has none to take it up")
                moved = weight.movedim(axis, -1) @ shift
                values[f"{reader.path}.{reader.bias}"] = parameters[f"{reader.path}.{reader.bias}"] + moved
    return values


def _check_alone(model: nn.Module, parameter: Tensor, name: str) -> None:
    """Raises ValueError if a parameter has a second owner, as a tied head has."""
    owners = [other for other, value in model.named_parameters(remove_duplicate=False) if value is parameter]
    if len(owners) > 1:
        other = next(owner for owner in owners if owner != name)
        raise ValueError(f"{name} is tied to {other}, which would change with it")


def _first_of_each(refused: Mapping[str, str]) -> dict[str, str]:
    first: dict[str, str] = {}
    for path, reason in refused.items():
        first.setdefault(reason, path)
    return {path: reason for reason, path in first.items()}
