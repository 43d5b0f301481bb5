"""A whole inspection: everything that the other modules measure, on one model and one sequence."""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import nn

from normstream import placements
from normstream.__about__ import __version__
from normstream.checkpoints.source import LoadedModel
from normstream.inspect.anatomy import Anatomy
from normstream.inspect.inputs import largest_prime, make_inputs
from normstream.inspect.inspection import Growth, Inspection, LayerRow, ModelFacts
from normstream.inspect.measures.attention_logits import attention_maxima
from normstream.inspect.measures.drop import layer_drops, sublayer_drops
from normstream.inspect.measures.gradients import gradient_norms
from normstream.inspect.measures.jacobian import jacobian_distances
from normstream.inspect.measures.lens import logit_lens
from normstream.inspect.measures.loss import loss_of
from normstream.inspect.measures.statistics import (
    borders,
    growth,
    influences,
    massive_activations,
    rms,
    stream_ratios,
    sublayer_rows,
)
from normstream.inspect.measures.stream_trace import Trace, identity, trace
from normstream.inspect.probing.norm_facts import find_norms
from normstream.inspect.probing.probe import anatomy_of
from normstream.inspect.report.own_wiring import own_wiring
from normstream.inspect.report.wiring import Wiring, wirings
from normstream.lab.runner import is_out_of_memory
from normstream.models import DecoderLM

TOKENS = 61
"""Length of the sequence: prime, so that a token axis shows by its size."""
Result = TypeVar("Result")


@dataclass
class Attempts:
    """Runs measurements one after the other; one that fails leaves a note and what stands for nothing measured."""

    progress: Callable[[str], None]
    notes: list[str] = field(default_factory=list)

    def of(self, what: str, measure: Callable[[], Result], nothing: Result) -> Result:
        """What ``measure`` returns, or ``nothing``. Only a lack of memory ends the inspection."""
        self.progress(what)
        try:
            return measure()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Only a ValueError is written to be read alone; "KeyError: 'x'" is a fault, and should look like one.
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.notes.append(f"no {what}: {next(iter(said.splitlines()), 'no reason given')}")
            return nothing

    def noted(self, what: str, measure: Callable[[], tuple[Result, tuple[str, ...]]], nothing: Result) -> Result:
        """The same for measurements that bring notes of their own."""
        result, notes = self.of(what, measure, (nothing, ()))
        self.notes += notes
        return result


def inspect_model(
    loaded: LoadedModel | nn.Module,
    text: str | None = None,
    n_tokens: int = TOKENS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Inspection:
    """Where the norms of a model are, and what its residual streams do on a text.

    Args:
        loaded: what ``normstream.checkpoints.load_source`` returns, or a model of your own.
        text: what the model reads, cut to ``n_tokens``; random tokens if None.
        n_tokens: length of the sequence; the nearest prime below it is taken.
        seed: of the random tokens, and of the probe's draws.
        progress: told what is measured next.

    Raises:
        ValueError: for inputs that cannot be made, and for a model that cannot be probed at all. What fails later is a
            note of the result.
    """
    begin = time.perf_counter()
    if isinstance(loaded, nn.Module):
        config, name = getattr(loaded, "config", None), type(loaded).__name__
        loaded = LoadedModel(loaded, config, None, "checkpoint", name, isinstance(loaded, DecoderLM))
    model: Any = loaded.model
    attempts = Attempts(progress, list(loaded.notes))
    inputs = _inputs(loaded, text, n_tokens, seed)
    progress("where the norms are")
    anatomy = None if loaded.is_ours else anatomy_of(model, seed=seed)
    attempts.notes += anatomy.notes if anatomy else ()
    drawn = _own_drawing(attempts, model, inputs) if anatomy is None else wirings(anatomy)
    seen = attempts.of("trace of the streams", lambda: trace(model, inputs, anatomy), None)
    rows = _stream_rows(attempts, seen, _texts(loaded, inputs)) if seen else {}
    rows |= _model_rows(attempts, seen, (model, inputs, anatomy))
    return Inspection(
        normstream=__version__,
        model=_facts(loaded, seen, anatomy, text, time.perf_counter() - begin),
        anatomy=anatomy,
        placement=_placements(loaded, anatomy),
        wiring=drawn,
        notes=joined(attempts.notes),
        **rows,
    )


def _inputs(loaded: LoadedModel, text: str | None, n_tokens: int, seed: int) -> dict[str, Any]:
    """``make_inputs``, also for a text to one of our own models, whose tokenizers are not those of transformers."""
    if text is None or not loaded.is_ours:
        return make_inputs(loaded.model, text, loaded.tokenizer, n_tokens, seed)
    ids = loaded.tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError(f"expected a text of at least 2 tokens, got {len(ids)}; give a longer one")
    length = largest_prime(min(len(ids), n_tokens, loaded.config.max_seq_len))
    return {"tokens_BT": torch.tensor([ids[:length]])}


def joined(notes: Iterable[str]) -> tuple[str, ...]:
    """Notes of one cause, which stands before "hence", as one; of those that differ in numbers alone, the first.

    >>> joined(["no loss, hence no lens", "layer 0 is odd", "no loss, hence no gradients", "layer 1 is odd"])
    ('no loss, hence no lens, no gradients', 'layer 0 is odd (and 1 more like this)')
    """
    effects: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        cause, _, effect = note.partition(", hence ")
        effects.setdefault(cause, []).extend([effect] if effect else [])
    whole = [f"{cause}, hence {', '.join(own)}" if own else cause for cause, own in effects.items()]
    alike: dict[str, list[str]] = {}
    for note in whole:
        alike.setdefault(re.sub(r"\d+", "0", note), []).append(note)
    return tuple(
        first + (f" (and {len(others)} more like this)" if others else "") for first, *others in alike.values()
    )


def _own_drawing(attempts: Attempts, model: Any, inputs: dict[str, Any]) -> tuple[Wiring, ...]:
    wiring = attempts.of("wiring diagram", lambda: own_wiring(model, find_norms(model, inputs)), None)
    if wiring is None:
        attempts.notes.append(
            f"no wiring diagram: the junctions of {model.config.placement} do more than add and norm; "
            f"their equation: {model.placement.equation}"
        )
        return ()
    return (wiring,)


def _model_rows(
    attempts: Attempts, seen: Trace | None, measured: tuple[Any, dict[str, Any], Anatomy | None]
) -> dict[str, Any]:
    """What takes further runs of the model, beside what the trace says about its layers."""
    rows: dict[str, Any] = {}
    with torch.no_grad():
        rows["loss"] = attempts.of("loss", lambda: loss_of(*measured), None)
        rows["heads"] = attempts.noted("attention logits", lambda: attention_maxima(*measured), ())
        rows["lens"] = attempts.noted("logit lens", lambda: logit_lens(*measured), ())
        drops = attempts.noted("loss without each layer", lambda: layer_drops(*measured), {})
        rows["drops"] = attempts.noted("loss without each sublayer", lambda: sublayer_drops(*measured), ())
    gradients = attempts.noted("gradients", lambda: gradient_norms(*measured), {})
    jacobians = attempts.noted("Jacobians", lambda: jacobian_distances(*measured), {})
    layers = []
    for key, turns in influences(seen).items() if seen else ():
        gradient = gradients.get(key)
        layers.append(
            LayerRow(
                *key,
                influence=fmean(turns.values()),
                gradient_norm=gradient and gradient.parameters,
                stream_gradient_norm=gradient and gradient.stream,
                jacobian_distance=jacobians.get(key),
                loss_increase=drops.get(key),
                influence_by_stream=turns,
                stream_gradient_norms=gradient.by_stream if gradient else {},
            )
        )
    return rows | {"layers": tuple(layers)}


def _stream_rows(attempts: Attempts, seen: Trace, texts: list[str] | None) -> dict[str, Any]:
    """What a trace alone tells."""
    attempts.notes += seen.notes
    return {
        "identity": attempts.of("residual identity", lambda: identity(seen), ()),
        "sublayers": attempts.of("statistics of the updates", lambda: sublayer_rows(seen), ()),
        "growth": attempts.of("growth law", lambda: _growth(seen), ()),
        "massive": attempts.of("massive activations", lambda: massive_activations(seen, texts), ()),
        "ratios": attempts.of("ratio of the streams", lambda: stream_ratios(seen), ()),
    }


def _growth(seen: Trace) -> tuple[Growth, ...]:
    """The laws, with the sizes that they were fitted to."""
    stacks = {stack.name: stack for stack in seen.stacks}
    return tuple(
        replace(law, sizes=tuple(rms(h) for h in borders(stacks[law.stack], law.stream))) for law in growth(seen)
    )


def _texts(loaded: LoadedModel, inputs: dict[str, Any]) -> list[str] | None:
    """The text of every token, where the model has a tokenizer and reads tokens."""
    ids = next((inputs[name] for name in ("decoder_input_ids", "input_ids", "tokens_BT") if name in inputs), None)
    if loaded.tokenizer is None or ids is None:
        return None
    return [loaded.tokenizer.decode([token]) for token in ids[0].tolist()]


def _placements(loaded: LoadedModel, anatomy: Anatomy | None) -> dict[str, str]:
    if anatomy is not None:
        return {stack.name: stack.placement for stack in anatomy.stacks}
    name = loaded.config.placement
    return {"main": placements.get(name).title}


def _facts(
    loaded: LoadedModel, seen: Trace | None, anatomy: Anatomy | None, text: str | None, seconds: float
) -> ModelFacts:
    model: Any = loaded.model
    stream = next(iter(seen.stacks[-1].layers[0].before.values())) if seen else torch.empty(0, 0)
    return ModelFacts(
        source=loaded.source,
        weights=loaded.weights,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        n_layers=sum(len(stack.layers) for stack in seen.stacks) if seen else 0,
        dim=stream.shape[-1],
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        attention="own" if loaded.is_ours else loaded.config._attn_implementation or "eager",
        tokens=stream.shape[-2],
        text=text,
        seconds=seconds,
        is_tied=loaded.config.tied if anatomy is None else anatomy.is_tied if anatomy.head else None,
    )
