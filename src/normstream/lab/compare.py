"""Comparing placements on equal terms: one run for every placement, learning rate and seed, then a summary."""

import tempfile
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from normstream import placements
from normstream.__about__ import __version__
from normstream.lab.budget import choose_steps, measure, parse_budget
from normstream.lab.live import RunState, display, say
from normstream.lab.plan import CompareConfig, Run
from normstream.lab.record import read_run
from normstream.lab.report import flatten
from normstream.lab.runner import OUT_OF_MEMORY, run_one
from normstream.lab.saver import Saver
from normstream.lab.style import MANY, join_words, label
from normstream.lab.summary import FORMAT, read_summary
from normstream.lab.workers import side_by_side
from normstream.models import ModelConfig, build_model
from normstream.tasks import TaskData, get_task
from normstream.training.config import TrainConfig, resolve, resolve_device
from normstream.training.config_file import config_to_dict, config_to_yaml
from normstream.training.files import write_text
from normstream.training.lock import FolderLock
from normstream.training.run_folder import begun, environment
from normstream.training.signals import Interrupted


def compare(
    config: CompareConfig, *, resume: bool = False, command: str = "", console: Console | None = None
) -> dict[str, Any]:
    """Run a comparison and return its summary.

    The folder `config.out` gets `config.yaml`, one run folder for each run and, after every run, `summary.json`,
    `summary.csv` and `report.html` (the last not after every short run). All runs read one data object in an order
    that depends on the seed alone, start from values that depend on the seed, the parameter's name and the
    initialization scheme alone (a placement brings its own unless `model.init` names one), and do the same number of
    updates on the same samples. A run that is out of memory is marked with advice and the others go on.

    Args:
        config: what to compare.
        resume: go on in a folder that holds an interrupted comparison; finished runs are not repeated.
        command: how the comparison was started, for the report.
        console: where to show progress; standard output if None.

    Raises:
        ValueError: before the first run, for a folder that is in use, data or models that do not fit, or a resumed
            comparison whose configuration differs, with the keys that do.
        MemoryError: at the end, if every run was out of memory.
        ChildProcessError: at the end, if processes of runs died.
        Interrupted: after SIGTERM or Ctrl-C; everything is saved.
    """
    began = time.perf_counter()
    console = console or Console()
    open_folder(config.out, resume)
    resolve_device(config.base.device)
    data = get_task(config.base.task).load(config.base.data)
    base = resolve(config.base, data)
    parameters = {run.placement: parameters_of(run, base) for run in first_runs(config)}
    say(console, parameter_line(parameters))
    with FolderLock(config.out):
        old = open_folder(config.out, resume)
        chosen = old["budget"] if old else budget(config, base, data, began, console)
        if config.budget and chosen:
            base = replace(base, steps=chosen["steps"])
        summary = describe(config, base, data, old["command"] if old else command) | {"budget": chosen}
        if old:
            refuse_changes(old, summary, config.out)
            summary["created"] = old["created"]
        summary["runs"] = [entry(run, config.out, base.steps, parameters[run.placement]) for run in config.runs()]
        write_text(config.out / "config.yaml", config_to_yaml(config))
        run_all(config.runs(), base, data, Saver(summary, config.out), console, config.jobs)
    say(console, f"\n{summary['conclusion']}\n\nReport: {config.out / 'report.html'}")
    if all(run["status"] == "out_of_memory" for run in summary["runs"]):
        raise MemoryError(f"no run could be finished; {OUT_OF_MEMORY}")
    return summary


def run_all(runs: list[Run], base: TrainConfig, data: TaskData, saver: Saver, console: Console, jobs: int = 1) -> None:
    """Do every run that is not finished; whatever happens, the summary and the report say how far each has come."""
    entries = saver.summary["runs"]
    metric = next(iter(get_task(base.task).metrics), None)
    states = [RunState(run.placement, run.lr, run.seed, base.steps, metric=metric) for run in runs]
    for state, known in zip(states, entries, strict=True):
        state.close(known)
    saver.save()
    pending = [(i, run.config(base), saver.out / run.folder) for i, run in enumerate(runs) if unfinished(entries[i])]

    def keep(index: int, status: dict[str, Any]) -> None:
        entries[index] = entry(runs[index], saver.out, base.steps, entries[index]["parameters"]) | status
        saver.save()

    try:
        with saver, display(states, console, jobs) as show:
            if jobs > 1:
                with closing(side_by_side(pending, base, jobs)) as steps:
                    for index, ended in steps:
                        if ended is None:
                            show.start(index)
                        else:
                            keep(index, ended)
                            show.end(entries[index], index)
                return
            for index, config, folder in pending:
                show.start(index)
                status: dict[str, Any] = {"status": "interrupted"}
                try:
                    status = run_one(config, folder, data, show.row)
                finally:
                    keep(index, status)
                show.end(entries[index], index)
    except Interrupted as stopped:
        say(console, f"{stopped}. Everything is saved: give the same command and --resume to go on.")
        raise


def unfinished(known: dict[str, Any]) -> bool:
    """Whether a run is still to be done, by its entry in the summary."""
    return known["status"] != "finished"


def open_folder(out: Path, resume: bool) -> dict[str, Any] | None:
    """Return the summary to go on with, None for a new comparison; ValueError for a folder that is something else.

    A comparison that was killed before its first summary has done no run, so its folder is as good as new.
    """
    found = begun(out)
    if not out.exists() or (out.is_dir() and found <= {"config.yaml"}):
        return None
    if not resume:
        raise ValueError(f"folder {out} exists already; choose another one (--out), or go on in it (--resume)")
    if "summary.json" not in found:
        raise ValueError(f"cannot resume: {out} has no summary.json, so no comparison was started in it")
    return read_summary(out / "summary.json")


def first_runs(config: CompareConfig) -> list[Run]:
    """One run of each placement, in order."""
    return config.runs()[: len(config.chosen())]


def parameters_of(run: Run, base: TrainConfig) -> int:
    """The number of parameters of a run's model; ValueError that names the placement, if it takes no such model."""
    try:
        return count_parameters(run.config(base).model)
    except ValueError as error:
        raise ValueError(f"placement {run.placement}: {error}") from None


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model, without the memory for it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config).parameters())


def parameter_line(parameters: dict[str, int]) -> str:
    """Say how many parameters each placement has, or of many, how few and how many.

    >>> parameter_line({"pre": 612864})
    'Parameters: Pre-Norm 612,864'
    """
    if len(parameters) <= MANY:
        return "Parameters: " + ", ".join(f"{label(placement)} {n:,}" for placement, n in parameters.items())
    ordered = sorted(parameters, key=parameters.__getitem__)
    fewest, most = (f"{parameters[name]:,} ({label(name)})" for name in (ordered[0], ordered[-1]))
    return f"Parameters: from {fewest} to {most}"


def budget(
    config: CompareConfig, base: TrainConfig, data: TaskData, began: float, console: Console
) -> dict[str, Any] | None:
    """Choose the steps that fit into the time since `began`, if one is given, and record what was measured."""
    if config.budget is None:
        return None
    first = {run.placement: run for run in first_runs(config)}
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        costs = {placement: measure(run.config(base), out / run.folder, data=data) for placement, run in first.items()}
        trial = describe(config, base, data, "") | {"budget": None}
        trial["runs"] = [
            entry(first[run.placement], out, base.steps, 0) | {"lr": run.lr, "seed": run.seed} for run in config.runs()
        ]
        saver = Saver(trial, out)
        saver.save()
    left = parse_budget(config.budget) - (time.perf_counter() - began) - saver.report_seconds
    steps = choose_steps(left, list(costs.values()), len(config.lrs) * len(config.seeds), base.eval_every)
    replace(base, steps=steps)  # a warm-up longer than that is refused here
    say(console, f"Budget {config.budget}: {steps} steps for every run")
    seconds = {placement: cost.step for placement, cost in costs.items()}
    return {"asked": config.budget, "steps": steps, "seconds_per_step": seconds}


def describe(config: CompareConfig, base: TrainConfig, data: TaskData, command: str) -> dict[str, Any]:
    """Everything about a comparison that is known before its first run."""
    shared = config_to_dict(base)
    # these differ from run to run
    del shared["model"]["placement"], shared["optimizer"]["lr"], shared["seed"]
    names = list(dict.fromkeys(run.placement for run in config.runs()))
    about = environment() | {"device": str(resolve_device(base.device)), "jobs": config.jobs}
    task = get_task(base.task)
    return {
        "format": FORMAT,
        "task": task.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "normstream": __version__,
        "environment": {key: value for key, value in about.items() if key not in ("normstream", "command", "started")},
        "data": {
            "source": base.data.source,
            "corpus_hash": data.corpus_hash,
            "tokenizer": None if data.tokenizer is None else data.tokenizer.name,
            "unit": task.unit,
            "train_size": data.train.size,
            "baseline_loss": None,
        },
        "placements": names,
        "lrs": list(config.lrs),
        "seeds": list(config.seeds),
        "tokens_per_run": round(base.steps * base.batch_size * task.tokens_per_sample(base, data)),
        "start": start(names, base),
        "config": shared,
    }


def start(names: list[str], base: TrainConfig) -> str:
    """Say from which values the models of different placements start, compared with each other.

    >>> start(["pre", "siamese"], TrainConfig())
    'started from the same values wherever two models have the same parameter'
    """
    if base.init_from is not None:
        return f"started from the weights in {base.init_from}"
    schemes: dict[str, list[str]] = {}
    for name in names:
        schemes.setdefault(placements.get(name).init, []).append(label(name))
    if base.model.init != "placement" or len(schemes) == 1:
        return "started from the same values wherever two models have the same parameter"
    *smaller, (usual, most) = sorted(schemes.items(), key=lambda scheme: len(scheme[1]))
    parts = [f"{scheme} for {join_words(own)}" for scheme, own in smaller]
    parts.append(f"{usual} for {join_words(most) if len(names) <= MANY else f'the other {len(most)}'}")
    said = "; ".join(parts)
    return f"started from the values of its placement's own initialization ({said}; set model.init to make them equal)"


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
