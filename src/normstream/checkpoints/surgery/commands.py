"""The commands ``fold``, ``prune`` and ``denorm``: each writes a changed model into a new folder."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import Positional, arg

from normstream.checkpoints.save import save_model
from normstream.checkpoints.source import LoadedModel, load_source
from normstream.checkpoints.surgery.denorm import DenormConfig, DenormReport, DenormStep, denorm
from normstream.checkpoints.surgery.fold import FoldReport, fold
from normstream.checkpoints.surgery.prune import PruneReport, prune
from normstream.checkpoints.tensors import refuse_existing
from normstream.data import DataConfig, load_data
from normstream.inspect.inputs import make_inputs
from normstream.inspect.paths import INDEX, short_name
from normstream.inspect.text_option import given_text
from normstream.lab.live import say

console = Console(highlight=False)
DONE = "normstream_changes"
"""Key of the safetensors metadata that says what was done to a model."""


@dataclass(frozen=True)
class Fold:
    """Move the gains and biases of norms into the matrices that read them; the function stays. Others are listed."""

    model: Positional[str]
    """Folder, or name on the Hugging Face hub."""
    out: Path | None = None
    """Folder to write; must not exist. By default runs/folded-NAME."""
    trust_remote_code: bool = False
    """Let Python files of the checkpoint run."""
    model_type: str | None = None
    """Type of a model whose config.json does not state it, as bert."""
    seed: int = 0
    """Of the tokens that logits are compared on."""

    def __call__(self) -> None:
        out = _folder(self.out, "folded", self.model)
        loaded = _load(self.model, self.trust_remote_code, self.model_type)
        report = fold(loaded.model, seed=self.seed)
        save_model(loaded, out, {DONE: "folded"})
        console.print(_fold_table(report))
        say(
            console,
            f"logits moved by {report.exact_error:.1e} of the largest in float64, "
            f"by {report.error:.1e} in {_name(loaded)}\nFolder: {out}",
        )


@dataclass(frozen=True)
class Prune:
    """Leave out the layers that turn the residual stream least, measured on a text or on random tokens."""

    model: Positional[str]
    """Folder, or name on the Hugging Face hub."""
    out: Path | None = None
    """Folder to write; must not exist. By default runs/pruned-NAME."""
    layers: int = 1
    """How many layers to leave out."""
    text: str | None = None
    """Text to measure on; random tokens by default."""
    text_file: Path | None = None
    """The same from a file."""
    tokens: int = 127
    """Longest sequence to measure on."""
    stack: str | None = None
    """encoder or decoder, where a model has both."""
    trust_remote_code: bool = False
    """Let Python files of the checkpoint run."""
    model_type: str | None = None
    """Type of a model whose config.json does not state it, as bert."""
    seed: int = 0
    """Of random tokens."""

    def __call__(self) -> None:
        text = given_text(self.text, self.text_file)
        out = _folder(self.out, "pruned", self.model)
        loaded = _load(self.model, self.trust_remote_code, self.model_type)
        inputs = make_inputs(loaded.model, text, loaded.tokenizer, self.tokens, self.seed)
        shorter, report = prune(loaded.model, self.layers, inputs, stack=self.stack, seed=self.seed)
        dropped = ", ".join(map(str, report.dropped))
        save_model(replace(loaded, model=shorter), out, {DONE: f"without layers {dropped}"})
        console.print(_influence_table(report))
        say(console, f"loss: {_number(report.loss_before)} before, {_number(report.loss_after)} after")
        say(console, f"config: {', '.join(f'{key} = {value}' for key, value in report.config.items())}")
        say(console, f"Folder: {out}")


Tuning = Annotated[DenormConfig, arg(name="")]


@dataclass(frozen=True)
class Denorm:
    """Fine-tune the norms out of a Pre-Norm decoder, one statistic after another (arXiv 2409.13710)."""

    model: Positional[str]
    """Folder, or name on the Hugging Face hub."""
    out: Path | None = None
    """Folder to write; must not exist. By default runs/denormed-NAME."""
    data: str = "stdlib"
    """Text to fine-tune on: any source that training takes."""
    seq_len: int = 128
    """Tokens of one sequence."""
    tokenizer: str | None = None
    """bytes, or the path of a tokenizer.json; by default the model's."""
    trust_remote_code: bool = False
    """Let Python files of the checkpoint run."""
    tuning: Tuning = field(default_factory=DenormConfig)

    def __call__(self) -> None:
        out = _folder(self.out, "denormed", self.model)
        loaded = _load(self.model, self.trust_remote_code, None, torch.float32)
        own = loaded.folder / "tokenizer.json" if loaded.folder else Path()
        tokenizer = self.tokenizer or (str(own) if own.is_file() else "bytes")
        data = load_data(DataConfig(self.data, tokenizer, seq_len=self.seq_len, cross_document_attention=True))
        with console.status("") as status:
            changed, report = denorm(loaded.model, data, self.tuning, lambda step: status.update(_progress(step)))
        save_model(replace(loaded, model=changed), out, {DONE: "norms removed: eps 1e12, gain 1e6 / sigma"})
        console.print(_denorm_table(report))
        say(console, f"Folder: {out}")


def _folder(out: Path | None, verb: str, source: str) -> Path:
    """Where to write; ValueError if it exists, before anything is read."""
    folder = out or Path("runs") / f"{verb}-{short_name(source)}"
    refuse_existing(folder)
    return folder


def _load(
    source: str, trust_remote_code: bool, model_type: str | None, dtype: torch.dtype | None = None
) -> LoadedModel:
    """The model, by default in a dtype that holds all that its folder stores."""
    loaded = load_source(source, dtype, trust_remote_code=trust_remote_code, model_type=model_type)
    if loaded.is_ours:
        raise ValueError(f"{source} is a run of normstream; this works on models of transformers")
    drawn = ("there are no weights, only a config: they are drawn",) if loaded.weights == "drawn" else ()
    for note in (*drawn, *loaded.notes):
        say(console, f"note: {note}")
    return loaded


def _fold_table(report: FoldReport) -> Table:
    """One row for norms at the same place in every layer, whose index is a star."""
    rows = {norm.path: ", ".join(norm.readers) for norm in report.folded}
    rows |= {path: f"stays: {reason}" for path, reason in report.refused.items()}
    table = Table(Column("norm", overflow="fold"), "into", box=None)
    starred = ((re.sub(INDEX, "*", path, count=1), _starred(into)) for path, into in rows.items())
    for norm, into in dict.fromkeys(starred):
        table.add_row(escape(norm), escape(into), style="yellow" if into.startswith("stays: ") else None)
    return table


def _starred(readers: str) -> str:
    return ", ".join(re.sub(INDEX, "*", reader, count=1) for reader in readers.split(", "))


def _influence_table(report: PruneReport) -> Table:
    table = Table("layer", "influence", "", box=None)
    for layer, influence in enumerate(report.influence):
        table.add_row(str(layer), f"{influence:.4f}", "left out" if layer in report.dropped else "")
    return table


def _denorm_table(report: DenormReport) -> Table:
    table = Table("held-out loss, nats a token", "", box=None)
    table.add_row("as it was", f"{report.loss_before:.4f}")
    table.add_row("all statistics fixed at once, not tuned", f"{report.loss_fixed_at_once:.4f}")
    table.add_row("without norms, tuned", f"{report.loss_after:.4f}")
    if report.loss_control is not None:
        table.add_row("with norms, tuned as long", f"{report.loss_control:.4f}")
    return table


def _progress(step: DenormStep) -> str:
    return f"update {step.step}: loss {step.loss:.4f}, {step.norms} norms left"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _name(loaded: Any) -> str:
    return str(loaded.model.dtype).removeprefix("torch.")
