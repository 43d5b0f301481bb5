"""Removing the norms of small trained models, and what that costs against fine-tuning that keeps them.

    python -m benchmarks.denorm

A GPT-2 (LayerNorm) and a Llama (RMSNorm) of transformers, 4 layers of width 128 with bytes as tokens, are trained on
the default corpus for a while, so that there is something to lose. ``denorm`` then takes their norms out by the
schedule of arXiv 2409.13710 with a third of its updates, and tunes a second copy as long with its norms in place.
Losses are means over the same held-out text, in nats a byte.

Prints the table of docs/surgery.md and writes ``benchmarks/results/denorm.json``; one core, six minutes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn

from benchmarks.machine import commit, machine, versions
from benchmarks.results import RESULTS
from normstream.checkpoints.surgery.denorm import DenormConfig, denorm
from normstream.data import Data, DataConfig, Loader, load_data
from normstream.optim import OptimizerConfig, ScheduleConfig, build_optimizer, learning_rate
from normstream.tasks.losses import loss_sum
from normstream.training.files import write_json

Family = Literal["gpt2", "llama"]
N_HEADS = 4
BYTES: dict[str, Any] = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
"""256 bytes and end-of-text."""
THIRD = DenormConfig(
    start=66, ffn_gap=7, qk_gap=7, v_gap=10, special_gap=7, first_gap=33, rest=47, warmup=33, decay_steps=667,
    eval_batches=64, seed=1000,
)  # fmt: skip
"""The published schedule with a third of its updates, in the same order."""


@dataclass(frozen=True)
class Settings:
    """What is trained, and how."""

    families: tuple[Family, ...] = ("gpt2", "llama")
    """Types of models."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of weights and of the order of the text."""
    n_layers: int = 4
    """Layers of a model."""
    dim: int = 128
    """Width of its residual stream."""
    seq_len: int = 64
    """Bytes of one sequence."""
    source: str = "stdlib"
    """Text to train on."""
    steps: int = 600
    """Updates before norms are removed."""
    lr: float = 3e-3
    """Peak learning rate of these."""
    denorm: DenormConfig = field(default_factory=lambda: THIRD)
    """How norms are removed; the seeds of models are added to its seed."""
    out: Path = RESULTS / "denorm.json"
    """The result file."""


@dataclass(frozen=True)
class Row:
    """One model."""

    family: Family
    seed: int
    parameters: int
    norms: int
    updates: int
    """Of each fine-tuning."""
    loss_before: float
    loss_fixed_at_once: float
    loss_without_norms: float
    loss_with_norms: float
    stored_error: float

    @property
    def cost(self) -> float:
        """What the norms were worth: the loss without them over the loss with them, both fine-tuned."""
        return self.loss_without_norms - self.loss_with_norms


def build(family: Family, settings: Settings, seed: int) -> nn.Module:
    """A randomly initialized model in evaluation mode: without dropout, as ``denorm`` trains too."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    if family == "gpt2":
        small = GPT2Config(
            **BYTES, n_embd=settings.dim, n_layer=settings.n_layers, n_head=N_HEADS, n_positions=settings.seq_len
        )
        return GPT2LMHeadModel(small).eval()
    config = LlamaConfig(
        **BYTES,
        hidden_size=settings.dim,
        intermediate_size=8 * settings.dim // 3,
        num_hidden_layers=settings.n_layers,
        num_attention_heads=N_HEADS,
        max_position_embeddings=settings.seq_len,
    )
    return LlamaForCausalLM(config).eval()


def train(model: nn.Module, data: Data, settings: Settings, seed: int) -> None:
    """Trains with AdamW and a cosine schedule, in place."""
    loader = Loader(data.train, settings.denorm.batch_size, seed)
    optimizer = build_optimizer(model, OptimizerConfig(lr=settings.lr))
    schedule = ScheduleConfig("cosine", warmup=settings.steps // 10)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, settings.lr, step + 1, settings.steps)
        batch = loader.batch(step)
        logits = model(input_ids=batch.inputs_BT, use_cache=False).logits
        (loss_sum(logits, batch.targets_BT) / batch.n_targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.denorm.clip)
        optimizer.step()
        optimizer.zero_grad()


def measure(family: Family, seed: int, data: Data, settings: Settings) -> Row:
    """Trains one model and removes its norms; the fine-tuning reads the text in another order than the training."""
    model = build(family, settings, seed)
    train(model, data, settings, seed)
    _, report = denorm(model, data, replace(settings.denorm, seed=settings.denorm.seed + seed))
    if report.loss_control is None:
        raise ValueError("denorm.control must be true: without it there is nothing to compare with")
    return Row(
        family=family,
        seed=seed,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        norms=report.steps[0].norms,
        updates=len(report.steps),
        loss_before=report.loss_before,
        loss_fixed_at_once=report.loss_fixed_at_once,
        loss_without_norms=report.loss_after,
        loss_with_norms=report.loss_control,
        stored_error=report.stored_error,
    )


def table(rows: Sequence[Row]) -> str:
    """Means over seeds and their standard deviations, a line for each family."""
    lines = [
        "| model | before | fixed at once | tuned with norms | tuned without norms | difference |",
        "|---|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(row.family for row in rows):
        found = [row for row in rows if row.family == family]
        columns = (
            [row.loss_before for row in found],
            [row.loss_fixed_at_once for row in found],
            [row.loss_with_norms for row in found],
            [row.loss_without_norms for row in found],
        )
        costs = [row.cost for row in found]
        lines.append(f"| `{family}` | {' | '.join(map(_mean, columns))} | {_mean(costs, '+')} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], sign: str = "") -> str:
    mean = f"{statistics.mean(values):{sign}.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def main(settings: Settings) -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    data = load_data(DataConfig(settings.source, seq_len=settings.seq_len, cross_document_attention=True))
    rows = []
    for family in settings.families:
        for seed in settings.seeds:
            rows.append(measure(family, seed, data, settings))
            print(rows[-1], flush=True)
    print(table(rows))
    described = {key: value for key, value in asdict(settings).items() if key != "out"}
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "settings": described,
        "rows": [asdict(row) for row in rows],
    }
    write_json(settings.out, result)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
