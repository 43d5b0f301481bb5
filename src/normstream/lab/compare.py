"""Comparing placements on equal terms: one run for every placement, learning rate and seed, then a summary."""

import gc
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from normstream.__about__ import __version__
from normstream.data import Data, load_data
from normstream.lab.budget import choose_steps, measure, parse_budget
from normstream.lab.conclusion import conclusion
from normstream.lab.live import RunState, display
from normstream.lab.plan import CompareConfig, Run
from normstream.lab.record import read_run
from normstream.lab.report import flatten, write_report
from normstream.lab.style import label
from normstream.lab.summary import FORMAT, read_summary, table, write_summary
from normstream.models import DecoderConfig, DecoderLM
from normstream.training.config import TrainConfig, resolve, resolve_device
from normstream.training.config_file import config_to_dict, config_to_yaml
from normstream.training.files import write_text
from normstream.training.loop import OnRow, train
from normstream.training.run_folder import environment
from normstream.training.signals import Interrupted

OUT_OF_MEMORY = (
    "out of memory: lower batch_size, data.seq_len, model.dim or model.n_layers, "
    "raise grad_accumulation (the update stays the same), or set activation_checkpointing"
)


def compare(
    config: CompareConfig, *, resume: bool = False, command: str = "", console: Console | None = None
) -> dict[str, Any]:
    """Run a comparison and return its summary.

    The folder `config.out` gets `config.yaml`, one run folder for each run and, after every run, `summary.json`,
    `summary.csv` and `report.html`. All runs read one data object in an order that depends on the seed alone, start
    from values that depend on the seed, the parameter's name and the initialization scheme alone (a placement brings
    its own unless `model.init` names one), and do the same number of updates on the same number of tokens.
    A run that is out of memory is marked with advice and the others go on.

    Args:
        config: what to compare.
        resume: go on in a folder that holds an interrupted comparison; finished runs are not repeated.
        command: how the comparison was started, for the report.
        console: where to show progress; standard output if None.

    Raises:
        ValueError: before the first run, for a folder that is in use, data or models that do not fit, or a resumed
            comparison whose configuration differs, with the keys that do.
        Interrupted: after SIGTERM or Ctrl-C; everything is saved.
    """
    console = console or Console()
    runs = config.runs()
    old = open_folder(config.out, resume)
    resolve_device(config.base.device)
    data = load_data(config.base.data)
    base = resolve(config.base, data)
    parameters = {run.placement: count_parameters(run.config(base).model) for run in runs}
    say(console, parameter_line(parameters))

    chosen = old["budget"] if old else budget(config, base, data, console)
    if config.budget and chosen:
        base = replace(base, steps=chosen["steps"])
    summary = describe(config, base, data, old["command"] if old else command) | {"budget": chosen}
    if old:
        refuse_changes(old, summary, config.out)
        summary["created"] = old["created"]
    summary["runs"] = [entry(run, config.out, base.steps, parameters[run.placement]) for run in runs]

    config.out.mkdir(parents=True, exist_ok=True)
    write_text(config.out / "config.yaml", config_to_yaml(config))
    save(summary, config.out)
    try:
        run_all(runs, base, data, summary, config.out, console)
    except Interrupted as stopped:
        say(console, f"{stopped}. Everything is saved: give the same command and --resume to go on.")
        raise
    say(console, f"\n{summary['conclusion']}\n\nReport: {config.out / 'report.html'}")
    return summary


def run_all(
    runs: list[Run], base: TrainConfig, data: Data, summary: dict[str, Any], out: Path, console: Console
) -> None:
    """Do every run that is not finished; whatever happens, the summary says how far each has come."""
    states = [RunState(run.placement, run.lr, run.seed, base.steps) for run in runs]
    for state, known in zip(states, summary["runs"], strict=True):
        state.close(known)
    with display(states, console) as show:
        for index, run in enumerate(runs):
            if summary["runs"][index]["status"] == "finished":
                continue
            show.start(index)
            status: dict[str, Any] = {"status": "interrupted"}
            try:
                status = run_one(run.config(base), out / run.folder, data, show.row)
            finally:
                parameters = summary["runs"][index]["parameters"]
                summary["runs"][index] = entry(run, out, base.steps, parameters) | status
                save(summary, out)
            show.end(summary["runs"][index])


def run_one(config: TrainConfig, folder: Path, data: Data, on_row: OnRow) -> dict[str, Any]:
    """Start a run or go on with it; return what its folder cannot say."""
    try:
        # An interrupted run goes on bit for bit, a folder that does not exist yet starts one.
        train(config, folder, resume=True, data=data, on_row=on_row)
        return {}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"status": "out_of_memory", "cause": OUT_OF_MEMORY}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on the CPU or an accelerator.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    message = str(error)
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in message or "out of memory" in message


def open_folder(out: Path, resume: bool) -> dict[str, Any] | None:
    """Return the summary to go on with, None for a new comparison; ValueError for a folder that is something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not resume:
        raise ValueError(f"folder {out} exists already; choose another one (--out), or go on in it (--resume)")
    if not (out / "summary.json").is_file():
        raise ValueError(f"cannot resume: {out} has no summary.json, so no comparison was started in it")
    return read_summary(out / "summary.json")


def count_parameters(config: DecoderConfig) -> int:
    """The number of parameters of a model, without the memory for it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in DecoderLM(config).parameters())


def say(console: Console, text: str) -> None:
    """Print plain text: a path or a number is not decorated, and a path is not broken into lines."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def parameter_line(parameters: dict[str, int]) -> str:
    """Say how many parameters each placement has.

    >>> parameter_line({"pre": 612864})
    'Parameters: Pre-Norm 612,864'
    """
    return "Parameters: " + ", ".join(f"{label(placement)} {n:,}" for placement, n in parameters.items())


def budget(config: CompareConfig, base: TrainConfig, data: Data, console: Console) -> dict[str, Any] | None:
    """Choose the steps that fit into the time, if one is given, and record what was measured."""
    if config.budget is None:
        return None
    begun = datetime.now(UTC)
    first = {run.placement: run for run in reversed(config.runs())}
    costs = {placement: measure(run.config(base), data) for placement, run in first.items()}
    left = parse_budget(config.budget) - (datetime.now(UTC) - begun).total_seconds()
    steps = choose_steps(left, list(costs.values()), len(config.lrs) * len(config.seeds), base.eval_every)
    replace(base, steps=steps)  # a warm-up longer than that is refused here
    say(console, f"Budget {config.budget}: {steps} steps for every run")
    seconds = {placement: cost.step for placement, cost in costs.items()}
    return {"asked": config.budget, "steps": steps, "seconds_per_step": seconds}


def describe(config: CompareConfig, base: TrainConfig, data: Data, command: str) -> dict[str, Any]:
    """Everything about a comparison that is known before its first run."""
    shared = config_to_dict(base)
    # these differ from run to run
    del shared["model"]["placement"], shared["optimizer"]["lr"], shared["seed"]
    about = environment() | {"device": str(resolve_device(base.device))}
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "normstream": __version__,
        "environment": {key: value for key, value in about.items() if key not in ("normstream", "command", "started")},
        "data": {
            "source": base.data.source,
            "corpus_hash": data.corpus_hash,
            "tokenizer": data.tokenizer.name,
            "train_tokens": len(data.train.tokens),
            "unigram_loss": None,
        },
        "placements": list(dict.fromkeys(run.placement for run in config.runs())),
        "lrs": list(config.lrs),
        "seeds": list(config.seeds),
        "tokens_per_run": base.steps * base.batch_size * base.data.seq_len,
        "config": shared,
    }


def refuse_changes(old: dict[str, Any], new: dict[str, Any], out: Path) -> None:
    """Raise ValueError that names every setting in which a resumed comparison differs from the one in the folder."""
    before, after = (
        dict(flatten(s["config"] | {k: s[k] for k in ("placements", "lrs", "seeds")}))
        | {"budget": (s["budget"] or {}).get("asked"), "corpus_hash": s["data"]["corpus_hash"]}
        for s in (old, new)
    )
    keys = [key for key in before | after if before.get(key) != after.get(key)]
    if keys:
        changed = "; ".join(f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys)
        raise ValueError(
            f"cannot resume {out} with another configuration ({changed}); restore it or choose another folder"
        )


def entry(run: Run, out: Path, steps: int, parameters: int) -> dict[str, Any]:
    """The summary's entry of a run, as far as its folder knows it."""
    which = {"placement": run.placement, "lr": run.lr, "seed": run.seed, "path": run.folder}
    return which | read_run(out / run.folder, steps) | {"parameters": parameters}


def save(summary: dict[str, Any], out: Path) -> None:
    """Bring the table and the conclusion up to date and write everything."""
    finished = [run for run in summary["runs"] if run["status"] == "finished"]
    summary["data"]["unigram_loss"] = finished[0]["unigram_loss"] if finished else None
    summary["unfinished"] = len(finished) < len(summary["runs"])
    summary["table"] = table(summary)
    summary["conclusion"] = conclusion(summary)
    write_summary(summary, out)
    write_report(summary, out / "report.html")
