"""Denorm: fine-tuning the norms out of a model, one statistic after another.

A norm whose statistic is a fixed number is a linear map; a model of such norms alone has none left.

From the paper (Heimersheim 2024, arXiv 2409.13710, "You can remove GPT2's LayerNorm by fine-tuning", with its code):
the order of removal (feed-forward norms layer by layer, then the queries' and keys' side of the attention norms, then
the values' side, then the final norm), the numbers of steps between, the fixed statistic as a mean over tokens
measured on the original model, another one for the first position and for end-of-text tokens in the values' path,
both given up at the end, and AdamW with its rates. The result is stored as that author does: norms stay in the file
with eps 1e12 and a gain 1e6 / sigma times theirs, so that plain transformers loads it.

Ours: RMSNorm (the paper has LayerNorm), any Pre-Norm decoder, values' rows found by value, the number of steps after
the last removal, and the statistic of the first *position*: the paper speaks of that, its code sets the first
*feature's*. For GPT-2 small and 2^19 tokens an update the paper reports a loss of 3.014 on OpenWebText without norms,
against 2.989 after the same fine-tuning with them and 3.095 before.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normstream.checkpoints.precise import answer, difference
from normstream.checkpoints.rebuild import eps_of_config, rebuild
from normstream.checkpoints.surgery.fixed_norms import HUGE_EPS, FixableNorms, Route
from normstream.checks import check_types
from normstream.data import Data
from normstream.data.loader import Loader
from normstream.data.packing import Batch
from normstream.inspect.inputs import make_inputs
from normstream.inspect.probing.probe import anatomy_of
from normstream.optim import OptimizerConfig, ScheduleConfig, build_optimizer, learning_rate
from normstream.tasks.losses import loss_sum
from normstream.tasks.task import spread

MEASURED_BATCHES = 8
"""Batches that the fixed statistics are a mean over."""
SAME = 1e-4
"""Largest relative difference of the logits that the stored form may make."""


@dataclass(frozen=True)
class DenormConfig:
    """How a model is fine-tuned while its norms go. The defaults are those of the paper's code for GPT-2 small.

    >>> DenormConfig().v_gap
    30
    """

    start: int = 200
    """Updates before the first removal."""
    ffn_gap: int = 20
    """Updates from one layer's feed-forward norm to the next; 0 removes all layers' at once. So do the other gaps."""
    qk_gap: int = 20
    """The same for the norms of queries and keys."""
    v_gap: int = 30
    """The same for the norms of values."""
    special_gap: int = 20
    """Updates from the removal of the final norm to that of the end-of-text tokens' own statistic."""
    first_gap: int = 100
    """Updates from there to the removal of the first position's own statistic."""
    rest: int = 140
    """Updates after the last removal, at least 1."""
    lr: float = 6e-4
    """Peak learning rate."""
    warmup: int = 100
    """Updates of linear warm-up."""
    decay_steps: int = 2000
    """Updates that the cosine takes down to a tenth of the peak; a run may end before."""
    weight_decay: float = 0.1
    """Of matrices and embeddings."""
    clip: float = 1.0
    """Largest global gradient norm."""
    batch_size: int = 8
    """Sequences of an update (the paper: 512 of 1,024 tokens)."""
    eval_batches: int = 16
    """Batches of held-out text that losses are measured on."""
    control: bool = True
    """Fine-tune a second copy, whose norms stay, for comparison: twice the time."""
    seed: int = 0
    """Of the order of the text."""

    def __post_init__(self) -> None:
        check_types(self)
        gaps = ("start", "ffn_gap", "qk_gap", "v_gap", "special_gap", "first_gap", "warmup", "weight_decay")
        counts = ("rest", "decay_steps", "batch_size", "eval_batches")
        for names, least in ((gaps, 0), (counts, 1)):
            if wrong := [name for name in names if not getattr(self, name) >= least]:
                raise ValueError(f"{wrong[0]} must be at least {least}, got {getattr(self, wrong[0])}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive finite number, got {getattr(self, name)}")


@dataclass(frozen=True)
class Removal:
    """What is fixed before an update (counted from 0)."""

    step: int
    what: Route | Literal["special", "first"]
    """A route, or ``special`` or ``first`` for what those tokens have of their own."""
    layer: int | None = None


@dataclass(frozen=True)
class DenormStep:
    """One update."""

    step: int
    loss: float
    lr: float
    norms: int
    """Norms that still have a statistic of each token."""


@dataclass(frozen=True)
class DenormReport:
    """Losses are means over the same held-out tokens, in nats."""

    loss_before: float
    loss_after: float
    loss_control: float | None
    """Loss after the same fine-tuning with all norms in place: what ``loss_after`` is to be compared with."""
    loss_fixed_at_once: float
    """Loss of the original model with every statistic fixed and no fine-tuning."""
    removals: tuple[Removal, ...]
    steps: tuple[DenormStep, ...]
    stored_error: float
    """Largest difference of logits between the trained model and its stored form, relative to the largest logit."""


def removal_schedule(config: DenormConfig, n_layers: int) -> tuple[Removal, ...]:
    """The removals in order.

    >>> [(r.step, r.what, r.layer) for r in removal_schedule(DenormConfig(), 12)][-3:]
    [(1040, 'final', None), (1060, 'special', None), (1160, 'first', None)]
    """
    found, step = [], config.start
    gaps: tuple[tuple[Route, int], ...] = (("ffn", config.ffn_gap), ("qk", config.qk_gap), ("v", config.v_gap))
    for what, gap in gaps:
        found += [Removal(step + layer * gap, what, layer) for layer in range(n_layers)]
        step += n_layers * gap
    special = step + config.special_gap
    return (*found, Removal(step, "final"), Removal(special, "special"), Removal(special + config.first_gap, "first"))


def denorm(
    model: nn.Module,
    data: Data,
    config: DenormConfig | None = None,
    on_step: Callable[[DenormStep], None] | None = None,
) -> tuple[nn.Module, DenormReport]:
    """Fine-tunes a copy of a Pre-Norm decoder while its norms are fixed one after another.

    Returns:
        The model in its stored form, float32, which plain transformers loads; and what happened.

    Raises:
        ValueError: for a model with other norms than pre and final ones, whose eps is not in its config, or whose
            vocabulary is smaller than the tokenizer's; or if training diverges.
    """
    config = DenormConfig() if config is None else config
    _check_vocabulary(model, data)
    original = copy.deepcopy(model).float().eval()  # evaluation mode: the paper has no dropout either
    inputs = make_inputs(original, seed=config.seed)
    anatomy = anatomy_of(original, inputs, config.seed)
    if not anatomy.norms:
        raise ValueError("the model has no norms: there is nothing to remove, or they were removed already")
    tuned = copy.deepcopy(original)
    with FixableNorms(tuned, inputs, anatomy) as norms:
        keys = _eps_keys(tuned, inputs, norms)
        removals = removal_schedule(config, norms.n_layers)
        run = _Tuning(tuned, data, config, norms)
        before = run.loss()
        norms.measure(run.passes(MEASURED_BATCHES))
        for removal in removals:
            _fix(norms, removal)
        at_once = run.loss()
        norms.reset()
        steps = run.train(removals, removals[-1].step + config.rest, on_step)
        after = run.loss()
        trained, gains = answer(tuned, inputs), norms.plain_gains()
    stored = rebuild(tuned, dict.fromkeys(keys, HUGE_EPS))
    with torch.no_grad():
        for name, gain in gains.items():
            stored.get_parameter(name).copy_(gain)
    error = difference(answer(stored, inputs), trained)
    if not error <= SAME:
        raise ValueError(f"the model cannot be stored with eps {HUGE_EPS:g}: its logits would move by {error:.1e}")
    control = None
    if config.control:
        run = _Tuning(original, data, config)
        run.train((), len(steps), None)
        control = run.loss()
    return stored, DenormReport(before, after, control, at_once, removals, tuple(steps), error)


class _Tuning:
    """A model that is fine-tuned on a text."""

    def __init__(self, model: nn.Module, data: Data, config: DenormConfig, norms: FixableNorms | None = None) -> None:
        self.model, self.data, self.config, self.norms = model, data, config, norms
        self.loader = Loader(data.train, config.batch_size, config.seed)

    def passes(self, count: int) -> Iterator[Callable[[], Any]]:
        """Forward passes over the first batches."""
        return (partial(self._sum, self.loader.batch(step)) for step in range(count))

    @torch.no_grad()
    def loss(self) -> float:
        """Mean loss on held-out text."""
        total, count = 0.0, 0
        for batch in spread(self.data.validation, self.config.batch_size, self.config.eval_batches):
            total += self._sum(batch).item()
            count += batch.n_targets
        return total / count

    def train(
        self, removals: Sequence[Removal], n_steps: int, on_step: Callable[[DenormStep], None] | None
    ) -> list[DenormStep]:
        config, done = self.config, []
        decay = OptimizerConfig(lr=config.lr, weight_decay=config.weight_decay, decay_embeddings=True)
        optimizer = build_optimizer(self.model, decay)
        for step in range(n_steps):
            for removal in removals:
                if removal.step == step and self.norms is not None:
                    _fix(self.norms, removal)
            lr = learning_rate(ScheduleConfig("cosine", config.warmup), config.lr, step + 1, config.decay_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = self._update(optimizer, step)
            done.append(DenormStep(step, loss, lr, self.norms.n_real if self.norms is not None else 0))
            if on_step is not None:
                on_step(done[-1])
        return done

    def _update(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        batch = self.loader.batch(step)
        loss = self._sum(batch) / batch.n_targets
        if not math.isfinite(loss.item()):
            raise ValueError(
                f"the loss is {loss.item()} at update {step}; lower lr, or put more updates between removals"
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def _sum(self, batch: Batch) -> Tensor:
        if self.norms is not None:
            self.norms.special_BT = batch.inputs_BT == self.data.tokenizer.eot
        return loss_sum(self.model(input_ids=batch.inputs_BT, use_cache=False).logits, batch.targets_BT)


def _fix(norms: FixableNorms, removal: Removal) -> None:
    if removal.what == "special":
        norms.keeps_special = False
    elif removal.what == "first":
        norms.keeps_first = False
    else:
        norms.fix(removal.what, removal.layer)


def _eps_keys(model: nn.Module, inputs: Mapping[str, Any], norms: FixableNorms) -> list[str]:
    served = eps_of_config(model, inputs, {norm.path: norm.facts for norm in norms.norms})
    covered = {path for paths in served.values() for path in paths}
    if missing := [norm.path for norm in norms.norms if norm.path not in covered]:
        raise ValueError(f"no key of the config sets the eps of {missing[0]}: the result could not be stored")
    return list(served)


def _check_vocabulary(model: Any, data: Data) -> None:
    size = model.get_input_embeddings().num_embeddings
    longest = getattr(model.config, "max_position_embeddings", None)  # GPT-2's n_positions has this name too
    if longest is not None and data.train.seq_len > longest:
        raise ValueError(
            f"sequences have {data.train.seq_len} tokens, the model takes {longest}; give a smaller seq_len"
        )
    if data.vocab_size > size:
        raise ValueError(f"the tokenizer has {data.vocab_size} tokens, the model {size}; give the model's tokenizer")
