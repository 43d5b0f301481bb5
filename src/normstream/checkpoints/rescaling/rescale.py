"""Rescaling a Transformer's residual stream exactly: h becomes h / 2^k everywhere, and the logits stay what they were.

A stream that grows beyond 65,504 overflows in fp16 although every norm that reads it hides its size. Dividing all
that is written to it by a power of two, and every reading norm's eps by the square of that, changes nothing else; see
``normstream.checkpoints.rescaling.plan`` for the rules.

    result = rescale(model)                      # the smallest k that leaves 16 times the room
    result.model, result.report
    rescale_checkpoint("path/to/model", Path("path/to/new"))
"""

import copy
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normstream.__about__ import __version__
from normstream.checkpoints.fill import not_finite
from normstream.checkpoints.precise import answer, difference, exact_answer
from normstream.checkpoints.rebuild import config_numbers, eps_attributes, eps_of_config, is_same, rebuild, separate
from normstream.checkpoints.rescaling import check
from normstream.checkpoints.rescaling.changes import EpsChange, Plan, Scaling
from normstream.checkpoints.rescaling.feeders import near, present
from normstream.checkpoints.rescaling.plan import Planner, norms_on_stream
from normstream.checkpoints.rescaling.report import LARGEST, EpsRow, PeakRow, RescaleReport
from normstream.checkpoints.rescaling.split import Split, split_branches
from normstream.inspect.anatomy import Anatomy, Call
from normstream.inspect.hooks import Recorder
from normstream.inspect.inputs import make_inputs
from normstream.inspect.probing.probe import anatomy_of

HEADROOM = 16.0
"""How far the largest |h| is to stay below 65,504: other texts are larger than the one that was measured."""
TOLERANCE = 1e-5
"""Largest error of the logits, over the largest of them, that counts as preserving the function: fp16's own is 1e-3."""
MARK = "normstream_rescale"
"""Key of a config, and of safetensors metadata, that says by how much a model was rescaled."""


@dataclass(frozen=True)
class Rescaled:
    """A rescaled model, what was done, and how far it was verified."""

    model: nn.Module
    plan: Plan
    report: RescaleReport


def rescale(
    model: nn.Module,
    inputs: Mapping[str, Any] | None = None,
    *,
    k: int | None = None,
    headroom: float = HEADROOM,
    anatomy: Anatomy | None = None,
    per_norm_eps: bool = False,
    tolerance: float = TOLERANCE,
    source: str = "",
) -> Rescaled:
    """A copy of the model whose residual stream is smaller by 2^k, verified.

    Args:
        model: in evaluation mode; it is not changed.
        inputs: keyword arguments of its ``forward``, which give the peaks; None: random tokens.
        k: the power; None takes the smallest that leaves ``headroom``.
        headroom: 65,504 over the largest |h| that is asked for.
        anatomy: of the model, if it is known.
        per_norm_eps: change eps in each norm module rather than in the config. Needs no config, but only a model in
            memory can have that: a saved one gets its eps from its config.
        tolerance: largest error of the float64 logits, over the largest logit.
        source: name of the model, for the report.

    Raises:
        ValueError: for a k, head-room or tolerance that makes no sense, or a k so large that eps would vanish; if the
            model was rescaled before, is quantised or has weights that are not finite; if its stream is small enough;
            if the function cannot be kept, saying why.
    """
    check_numbers(k, headroom, tolerance)
    refuse(model)
    inputs = make_inputs(model) if inputs is None else inputs
    anatomy = anatomy_of(model, inputs) if anatomy is None else anatomy
    if not any(stack.layers for stack in anatomy.stacks):
        raise ValueError("no residual stream was found in this model (normstream inspect says why); it is not rescaled")
    before = check.stream_peaks(model, inputs, anatomy)
    k = choose_power(max(before.values()), headroom) if k is None else k
    plan = make_plan(model, inputs, anatomy, k, per_norm_eps=per_norm_eps)
    _check_eps(plan)
    new = apply(model, plan)
    splits = split_branches(new, inputs, anatomy, headroom, per_norm_eps=per_norm_eps)
    if any(split.scalings for split in splits):
        plan = with_splits(plan, splits)
        new = apply(model, plan)
    report = _report(model, new, plan, splits, inputs, anatomy, before, source)
    if not report.error_fp64 <= tolerance:
        where = check.first_unscaled(model, new, inputs, anatomy, k)
        raise ValueError(_refusal(report, tolerance, where))
    setattr(_owner_of_mark(new), MARK, {"k": k, "version": __version__})
    return Rescaled(new, plan, report)


def check_numbers(k: int | None, headroom: float, tolerance: float) -> None:
    """Raises ValueError for numbers that ask for nothing that could be done."""
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, got {k}: the stream is divided by 2^k")
    if not 0 < headroom < math.inf:
        raise ValueError(f"headroom must be a positive finite number, got {headroom}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance}")


def _check_eps(plan: Plan) -> None:
    """Raises ValueError if an eps becomes smaller than float32's smallest normal number."""
    smallest = min((change.before for change in plan.eps if change.before), default=1.0)
    most = math.floor(math.log(smallest / torch.finfo(torch.float32).tiny, 4))
    if plan.k > most:
        raise ValueError(f"k = {plan.k} is too large: eps {smallest:.3g} / 4^k would vanish in float32; at most {most}")


def refuse(model: nn.Module) -> None:
    """Raises ValueError for a model that was rescaled before, or whose weights are quantised."""
    mark = getattr(_owner_of_mark(model), MARK, None)
    if mark is not None:
        raise ValueError(f"this model was rescaled by 2^{mark['k']} already; rescale the original, with a larger k")
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ValueError("the weights are quantised: their scales would have to be rescaled; give the original weights")
    if broken := not_finite(dict(model.named_parameters())):
        raise ValueError(f"{broken[0]} holds NaN or infinity; expected a model whose weights are finite numbers")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise ValueError(f"{name} is quantised ({parameter.dtype}); give the original weights")


def _owner_of_mark(model: nn.Module) -> Any:
    """The config of transformers, which is saved with the model; else the model itself."""
    config = getattr(model, "config", None)
    return config if hasattr(config, "to_dict") else model


def choose_power(peak: float, headroom: float) -> int:
    """The smallest k that leaves the head-room.

    Raises:
        ValueError: if none is needed, or the peak is not finite.

    >>> choose_power(2.5e5, headroom=16)
    6
    """
    if not math.isfinite(peak):
        raise ValueError("the stream overflows in the dtype that the model is in; load it in float32")
    k = check.power_for(peak, headroom)
    if k == 0:
        raise ValueError(
            f"nothing to do: the largest |h| is {peak:.4g}, and {headroom:g} times that fits below 65,504; "
            "ask for more head-room, or give k"
        )
    return k


# The plan -----------------------------------------------------------------------------------------------------------


def make_plan(model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy, k: int, *, per_norm_eps: bool) -> Plan:
    """What has to change for h / 2^k; multipliers of the config alone if they do it.

    Raises:
        ValueError: if the function cannot be kept, saying why.
    """
    reading = norms_on_stream(anatomy)
    if per_norm_eps:
        return Planner(model, inputs, anatomy, k, reading).plan()
    facts = {site.call.path: site.facts for site in anatomy.norms}
    served = {key: paths for key, paths in eps_of_config(model, inputs, facts).items() if paths & reading}
    numbers = config_numbers(model, lambda value: True)
    config = {key: numbers[key] * 4.0**-k for key in served}
    moved = frozenset().union(*served.values())
    planner = Planner(model, inputs, anatomy, k, moved)
    if moved == reading and (multipliers := _multipliers(model, inputs, anatomy, k, config)):
        return Plan(k, (), planner.eps_changes(), config | multipliers)
    plan = planner.plan()
    if plan.untied is not None:
        config["tie_word_embeddings"] = False
    return replace(plan, config=config)


def _multipliers(
    model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy, k: int, eps: Mapping[str, float]
) -> dict[str, float] | None:
    """New values of an embedding and a residual multiplier of the config that rescale the stream by themselves.

    None too where a branch returns more than fp16 holds: it would still do so, before it is multiplied.
    """
    if any(site.place in ("trunk", "embedding") for site in anatomy.norms):
        return None
    starts = [stack.embedding_multiplier for stack in anatomy.stacks]
    updates = [sublayer.multiplier for stack in anatomy.stacks for sublayer in stack.sublayers]
    start_numbers = config_numbers(model, lambda value: all(is_same(value, measured) for measured in starts))
    update_numbers = config_numbers(model, lambda value: all(is_same(value, measured) for measured in updates))
    if not start_numbers or not update_numbers or _largest_output(model, inputs, anatomy) > LARGEST:
        return None
    before = _stack_ends(model, inputs, anatomy)
    for start, update in itertools.product(start_numbers, update_numbers):
        if start == update:
            continue
        found = {start: start_numbers[start] * 2.0**-k, update: update_numbers[update] * 2.0**-k}
        try:
            after = _stack_ends(rebuild(model, {**eps, **found}), inputs, anatomy)
        except (TypeError, ValueError):
            continue  # a number of another kind, which this class does not take
        if all(near(new * 2**k, old) for new, old in zip(after, before, strict=True)):
            return found
    return None


def _stack_ends(model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy) -> list[Tensor]:
    return _outputs(model, inputs, [stack.layers[-1].call for stack in anatomy.stacks])


def _largest_output(model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy) -> float:
    calls = [sublayer.output for stack in anatomy.stacks for sublayer in stack.sublayers]
    return max(output.abs().max().item() for output in _outputs(model, inputs, calls))


def _outputs(model: nn.Module, inputs: Mapping[str, Any], calls: Iterable[Call]) -> list[Tensor]:
    with Recorder(model) as recorder:
        run = recorder.run(inputs)
    return [present(run.output(call), call) for call in calls]


def with_splits(plan: Plan, splits: Iterable[Split]) -> Plan:
    """A plan with the splits of branches added."""
    scalings = dict.fromkeys(scaling for split in splits for scaling in split.scalings)
    eps = dict.fromkeys(change for split in splits for change in split.eps)
    return replace(plan, scalings=(*plan.scalings, *scalings), eps=(*plan.eps, *eps))


# Applying it --------------------------------------------------------------------------------------------------------


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """A new model with a plan carried out: new values in its config if there are any, else eps in each norm module."""
    if plan.config:
        new = rebuild(model, plan.config)
        separate(new)
    else:
        new = copy.deepcopy(model)
        for change in plan.eps:
            set_eps(new, change)
    if plan.untied is not None:
        untie(new, plan.untied)
    parameters = dict(new.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for scaling in plan.scalings:
            parameter = parameters[scaling.parameter]
            parameter.copy_(scaled(parameter, scaling).to(parameter.dtype))
    return new


def scaled(value: Tensor, scaling: Scaling) -> Tensor:
    """A parameter after a scaling; a zero-centred gain in float64, before it is rounded.

    >>> scaled(torch.tensor([0.5, 1.0]), Scaling("w", "writer", -1, rows=(1,)))
    tensor([0.5000, 0.5000])
    >>> scaled(torch.tensor([0.5]), Scaling("w", "writer", -1, is_zero_centred=True))
    tensor([-0.2500], dtype=torch.float64)
    """
    factor = 2.0**scaling.exponent
    if scaling.is_zero_centred:
        return (1 + value.double()) * factor - 1
    if scaling.rows is None:
        return value * factor
    factors = value.new_ones(value.shape[scaling.axis])
    factors[list(scaling.rows)] = factor
    return value * factors.reshape([-1 if axis == scaling.axis else 1 for axis in range(value.ndim)])


def set_eps(model: nn.Module, change: EpsChange) -> None:
    """Changes the eps of one norm module.

    Raises:
        ValueError: if it is no number that the module holds.
    """
    module = model.get_submodule(change.path)
    names = eps_attributes(module, change.before)
    if not names:
        raise ValueError(
            f"the eps of {change.path} ({change.before:.3g}) is fixed in the code of {type(module).__name__}"
        )
    for name in names:
        setattr(module, name, getattr(module, name) * 2.0**change.exponent)


def untie(model: nn.Module, head: str) -> None:
    """Gives a head a matrix of its own."""
    module = model.get_submodule(head)
    for name, matrix in list(module.named_parameters(recurse=False)):
        if matrix.ndim > 1:
            setattr(module, name, nn.Parameter(matrix.detach().clone(), matrix.requires_grad))


# The report ---------------------------------------------------------------------------------------------------------


def _report(
    old: nn.Module,
    new: nn.Module,
    plan: Plan,
    splits: Iterable[Split],
    inputs: Mapping[str, Any],
    anatomy: Anatomy,
    peaks: Mapping[tuple[str, int], float],
    source: str,
) -> RescaleReport:
    check.refuse_clamps(old, new, inputs)
    reference = exact_answer(old, inputs)
    after = check.stream_peaks(new, inputs, anatomy)
    gains = [scaling for scaling in plan.scalings if scaling.is_zero_centred]
    names = {scaling.parameter for scaling in gains}
    weights, subnormal, flushed = check.subnormals(old, new)
    fp32 = [answer(check.cast(model, torch.float32), inputs) for model in (old, new)]
    return RescaleReport(
        source=source,
        k=plan.k,
        method="weights" if plan.scalings else "config",
        peaks=tuple(PeakRow(*key, before=peak, after=after[key]) for key, peak in peaks.items()),
        headroom=LARGEST / max(after.values()),
        error_fp64=difference(exact_answer(new, inputs), reference),
        is_bit_equal_fp32=torch.equal(*fp32),
        fp16_before=check.run_in(old, torch.float16, inputs, anatomy, reference),
        fp16_after=check.run_in(new, torch.float16, inputs, anatomy, reference),
        fp16_fp32_gains=check.run_in(new, torch.float16, inputs, anatomy, reference, names) if names else None,
        eps=eps_rows(plan),
        config=plan.config,
        untied=plan.untied,
        n_weights=weights,
        n_subnormal=subnormal,
        n_flushed=flushed,
        n_zero_centred=sum(new.get_parameter(name).numel() for name in names),
        zero_centred_error=max((_rounding(old, new, scaling, None) for scaling in gains), default=0.0),
        zero_centred_error_fp16=max((_rounding(old, new, scaling, torch.float16) for scaling in gains), default=0.0),
        branches=tuple(row for split in splits for row in split.rows),
        inexact=plan.inexact,
        notes=(*anatomy.notes, *plan.notes),
    )


def _rounding(old: nn.Module, new: nn.Module, scaling: Scaling, dtype: torch.dtype | None) -> float:
    """Largest relative error of a gain 1 + w, with w as it is stored or in another dtype."""
    exact = 1 + scaled(old.get_parameter(scaling.parameter).detach(), scaling)
    stored = new.get_parameter(scaling.parameter).detach()
    stored = 1 + (stored if dtype is None else stored.to(dtype)).double()
    return ((stored - exact).abs() / exact.abs()).max().item()


def eps_rows(plan: Plan) -> tuple[EpsRow, ...]:
    """The changes of eps, norms with the same change together."""
    groups: dict[tuple[float, int], list[str]] = {}
    for change in plan.eps:
        groups.setdefault((float(f"{change.before:.3g}"), change.exponent), []).append(change.path)
    return tuple(EpsRow(tuple(paths), eps, eps * 2.0**power) for (eps, power), paths in groups.items())


def _refusal(report: RescaleReport, tolerance: float, where: str | None) -> str:
    place = f" (the stream first differs at the {where})" if where else ""
    reasons = report.inexact or (f"something does not scale with the stream, or was not found{place}",)
    more = f" ... ({len(reasons)} reasons)" if len(reasons) > 3 else ""
    return (
        f"the function would not be kept: the logits differ by {report.error_fp64:.1e} of the largest in float64, "
        f"more than {tolerance:.0e}. {'; '.join(reasons[:3])}{more}"
    )
