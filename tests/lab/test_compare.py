"""Whole comparisons on a tiny text, through the public function."""

import csv
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from normstream.data import DataConfig, load_data
from normstream.lab import CompareConfig, compare
from normstream.lab import runner as module
from normstream.lab.budget import Cost
from normstream.lab.summary import DATA_KEYS, KEYS, RUN_KEYS
from normstream.layers import LatentConfig
from normstream.models import DecoderConfig
from normstream.placements import names
from normstream.training import Interrupted, TrainConfig, read_metrics, resolve
from normstream.training.lock import FolderLock

pytestmark = pytest.mark.usefixtures("_without_pictures")
TIMES = ("tokens_per_second", "seconds")


@pytest.fixture
def config(tmp_path: Path) -> CompareConfig:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    base = TrainConfig(
        model=DecoderConfig(dim=16, n_layers=2, n_heads=2, ffn_dim=16, max_seq_len=16),
        data=DataConfig(source=str(tmp_path / "text.txt"), seq_len=16, validation_fraction=0.2),
        steps=8, batch_size=4, eval_every=4, eval_batches=2, stats_every=4, checkpoint_every=3, device="cpu",
    )  # fmt: skip
    return CompareConfig(placements=("pre", "siamese"), lrs=(1e-2,), seeds=(0, 1), base=base, out=tmp_path / "out")


@pytest.fixture
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these small runs."""
    monkeypatch.setattr("normstream.lab.report.pictures", lambda summary: [])


def quietly(config: CompareConfig, **options: Any) -> tuple[dict[str, Any], str]:
    """Compare without a terminal; return the summary and what was printed."""
    printed = io.StringIO()
    summary = compare(config, console=Console(file=printed, width=200), **options)
    return summary, printed.getvalue()


def timeless(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in run.items() if key not in TIMES} for run in summary["runs"]]


def trained_by(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> list[str]:
    """Let `change(train, config, folder, **rest)` stand in for train; return the folders it was called with."""
    train, called = module.train, []

    def instead(config: TrainConfig, folder: Path, **rest: Any) -> Any:
        called.append(folder.name)
        return change(train, config, folder, **rest)

    monkeypatch.setattr(module, "train", instead)
    return called


def test_writes_everything(config):
    summary, printed = quietly(config, command="normstream compare --test")
    out = config.out
    assert set(summary) == set(KEYS)
    assert set(summary["data"]) == set(DATA_KEYS)
    assert all(set(run) == set(RUN_KEYS) for run in summary["runs"])
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert len(list(csv.reader((out / "summary.csv").read_text().splitlines()))) == 1 + 4
    html = (out / "report.html").read_text()
    assert "normstream compare --test" in html
    assert summary["conclusion"].split(". ")[0] in html
    assert summary["conclusion"] in " ".join(printed.split())
    assert [run["status"] for run in summary["runs"]] == ["finished"] * 4
    assert not summary["unfinished"]
    assert "Parameters: Pre-Norm" in printed


def test_runs_are_on_equal_terms(config):
    summary, _ = quietly(config)
    pre, siamese = (summary["runs"][i] for i in (0, 1))
    # 5 junctions, each with one norm of width 16 in Pre-Norm and three in SiameseNorm: N_x, N_y and N_in
    assert siamese["parameters"] - pre["parameters"] == 2 * 5 * 16
    configs = [(config.out / run["path"] / "config.yaml").read_text().splitlines() for run in (pre, siamese)]
    different = [lines for lines in zip(*configs, strict=True) if lines[0] != lines[1]]
    assert different == [("  placement: pre", "  placement: siamese")]
    tokens = [read_metrics(config.out / run["path"] / "metrics.jsonl", "train")[-1]["tokens"] for run in (pre, siamese)]
    assert tokens == [8 * 4 * 16] * 2 == [summary["tokens_per_run"]] * 2


def test_one_data_object_for_all_runs(config, monkeypatch):
    seen = []
    trained_by(monkeypatch, lambda train, *args, data, **rest: seen.append(data) or train(*args, data=data, **rest))
    quietly(config)
    assert len(seen) == 4
    assert len(set(map(id, seen))) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed_equals_uninterrupted(config, monkeypatch, number):
    whole, _ = quietly(config)
    broken = replace(config, out=config.out.with_name("broken"))

    def stopped_in_the_second_run(train, settings, folder, on_row, **rest):
        def stop(row):
            on_row(row)
            if folder.name.startswith("siamese") and row["kind"] == "train" and row["step"] == 5:
                os.kill(os.getpid(), number)

        return train(settings, folder, on_row=stop, **rest)

    with monkeypatch.context() as patch:
        trained_by(patch, stopped_in_the_second_run)
        console = Console(file=io.StringIO(), width=200)
        with pytest.raises(Interrupted), console.capture() as printed:
            compare(broken, console=console)
    assert "give the same command and --resume to go on" in printed.get()
    partial = json.loads((broken.out / "summary.json").read_text())
    assert [run["status"] for run in partial["runs"]] == ["finished", "interrupted", "pending", "pending"]
    assert partial["runs"][1]["curve"]["step"] == [1, 2, 3, 4, 5]
    assert "3 of 4 runs missing" in (broken.out / "report.html").read_text()

    called = trained_by(monkeypatch, lambda train, *args, **rest: train(*args, **rest))
    resumed, _ = quietly(broken, resume=True)
    assert len(called) == 3  # the finished run is not repeated
    assert timeless(resumed) == timeless(whole)
    assert resumed["created"] == partial["created"]


def test_out_of_memory_marks_the_run_and_goes_on(config, monkeypatch):
    def starved(train, settings, folder, **rest):
        if settings.model.placement == "siamese" and settings.seed == 0:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return train(settings, folder, **rest)

    with monkeypatch.context() as patch:
        trained_by(patch, starved)
        summary, printed = quietly(config)
    assert [run["status"] for run in summary["runs"]] == ["finished", "out_of_memory", "finished", "finished"]
    assert "lower batch_size" in summary["runs"][1]["cause"]
    assert "lower batch_size" in printed
    again, _ = quietly(config, resume=True)
    assert [run["status"] for run in again["runs"]] == ["finished"] * 4


def test_all_out_of_memory_is_an_error(config, monkeypatch):
    def starved(*_: Any, **__: Any) -> None:
        raise MemoryError

    trained_by(monkeypatch, starved)
    with pytest.raises(MemoryError, match="no run could be finished; out of memory: lower batch_size"):
        quietly(config)
    summary = json.loads((config.out / "summary.json").read_text())
    assert [run["status"] for run in summary["runs"]] == ["out_of_memory"] * 4
    assert "No run has finished yet" in (config.out / "report.html").read_text()


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_kinds_of_out_of_memory(error):
    assert module.is_out_of_memory(error)


def test_two_at_a_time_give_the_same_losses(config, tmp_path):
    """Worker processes have one thread each, as this one."""
    alone, _ = quietly(config)
    together, printed = quietly(replace(config, jobs=2, out=tmp_path / "together"))
    assert timeless(together) == timeless(alone)
    assert printed.count("finished") == 4


def test_all_stands_for_every_placement(config):
    chosen = replace(config, placements=("all", "post(final_norm=true)")).chosen()
    assert chosen == [*names(), "post(final_norm=true)"]


def test_a_placement_that_takes_no_such_model_is_named_before_the_first_run(config):
    model = replace(config.base.model, latent=LatentConfig(kv_rank=4))
    with pytest.raises(ValueError, match="placement olmo2: latent attention"):
        quietly(replace(config, placements=("pre", "olmo2"), base=replace(config.base, model=model)))
    assert not config.out.exists()


def test_jobs_and_budget_exclude_each_other(config):
    with pytest.raises(ValueError, match="one run at a time"):
        replace(config, jobs=2, budget="1m")


def test_other_errors_are_not_hidden(config, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not match")

    trained_by(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        quietly(config)


def test_nothing_runs_in_a_folder_that_is_in_use(config, monkeypatch):
    called = trained_by(monkeypatch, lambda *_, **__: None)
    config.out.mkdir()
    (config.out / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already; choose another one"):
        quietly(config)
    with pytest.raises(ValueError, match=r"has no summary\.json"):
        quietly(config, resume=True)
    assert called == []
    assert [path.name for path in config.out.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize("resume", [False, True])
def test_killed_before_the_first_summary_is_as_good_as_new(config, resume):
    config.out.mkdir()
    for name in ("config.yaml", ".config.yaml.tmp", ".summary.json.tmp", ".lock"):
        (config.out / name).write_text("")
    summary, _ = quietly(replace(config, seeds=(0,)), resume=resume)
    assert [run["status"] for run in summary["runs"]] == ["finished"] * 2


@pytest.mark.parametrize("resume", [False, True])
def test_only_one_process_at_a_time(config, monkeypatch, resume):
    called = trained_by(monkeypatch, lambda *_, **__: None)
    with FolderLock(config.out):
        before = [(path.name, path.read_bytes()) for path in config.out.iterdir()]
        with pytest.raises(ValueError, match=str(os.getpid())):
            quietly(config, resume=resume)
        assert [(path.name, path.read_bytes()) for path in config.out.iterdir()] == before
    assert called == []


def test_locked_while_it_runs(config, monkeypatch):
    def second(train, settings, folder, **rest):
        with pytest.raises(ValueError, match=str(os.getpid())):
            quietly(config, resume=True)
        return train(settings, folder, **rest)

    trained_by(monkeypatch, second)
    quietly(replace(config, seeds=(0,)))
    quietly(replace(config, seeds=(0,)), resume=True)


def test_a_finished_run_without_its_metrics_stops_the_resumed_comparison(config):
    summary, _ = quietly(config)
    (config.out / summary["runs"][1]["path"] / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"siamese_lr0\.01_seed0.metrics\.jsonl has no training rows"):
        quietly(config, resume=True)


def test_resume_names_the_keys_that_differ(config):
    quietly(config)
    before = (config.out / "summary.json").read_bytes()
    other = replace(config, lrs=(1e-2, 1e-3), base=replace(config.base, batch_size=2))
    with pytest.raises(ValueError, match=r"batch_size: 4 -> 2; lrs: 0\.01 -> 0\.01, 0\.001"):
        quietly(other, resume=True)
    assert (config.out / "summary.json").read_bytes() == before


def test_bad_data_and_devices_stop_before_the_first_run(config):
    for base in (
        replace(config.base, device="cuda:99"),
        replace(config.base, data=replace(config.base.data, source="missing.txt")),
    ):
        with pytest.raises(ValueError, match=r"not available|missing\.txt"):
            quietly(replace(config, base=base))
    assert not config.out.exists()


def test_budget_gives_every_run_the_same_steps(config, monkeypatch):
    costs = {"pre": Cost(0.0, 0.5, 0.0), "siamese": Cost(0.0, 1.5, 0.0)}
    monkeypatch.setattr(
        sys.modules["normstream.lab.compare"], "measure", lambda settings, folder, data: costs[settings.model.placement]
    )
    timed = replace(config, budget="100s")
    summary, printed = quietly(timed)
    # 95 s for 2 seeds of 0.5 s + 1.5 s a step, less the moment that measuring took here
    assert summary["budget"]["steps"] in (22, 23)
    assert {run["steps"] for run in summary["runs"]} == {summary["budget"]["steps"]}
    assert summary["budget"]["seconds_per_step"] == {"pre": 0.5, "siamese": 1.5}
    assert "Budget 100s: 2" in printed
    assert "fit a budget of 100s" in (config.out / "report.html").read_text()

    monkeypatch.setattr(
        sys.modules["normstream.lab.compare"], "measure", lambda *_, **__: pytest.fail("measured again")
    )
    again, _ = quietly(timed, resume=True)
    assert again["budget"] == summary["budget"]


def test_budget_measures_real_steps(config):
    summary, _ = quietly(replace(config, seeds=(0,), budget="6s"))
    assert summary["budget"]["steps"] >= 20
    assert all(seconds > 0 for seconds in summary["budget"]["seconds_per_step"].values())
    assert summary["runs"][0]["steps"] == summary["config"]["steps"] == summary["budget"]["steps"]


def test_budget_where_every_run_diverges_at_once(config):
    base = replace(config.base, clip=None)
    summary, _ = quietly(replace(config, placements=("pre",), lrs=(1e30,), seeds=(0,), base=base, budget="6s"))
    assert summary["budget"]["steps"] >= 20
    assert summary["runs"][0]["diverged"]
    assert summary["runs"][0]["steps"] < 5


def test_budget_leaves_time_for_the_report(config, monkeypatch):
    """Loading took 20 s and the report takes 40 s, so 40 s of 100 s are left; 5 % of them are kept in reserve."""
    module = sys.modules["normstream.lab.compare"]
    monkeypatch.setattr(module, "measure", lambda *_, **__: Cost(0.0, 0.1, 0.0))
    monkeypatch.setattr(module, "Saver", lambda *_: SimpleNamespace(save=lambda: None, report_seconds=40.0))
    data = load_data(config.base.data)
    base, began = resolve(config.base, data), time.perf_counter() - 20
    chosen = module.budget(replace(config, budget="100s"), base, data, began, Console(file=io.StringIO()))
    assert chosen["steps"] in (93, 94)  # 38 s / (4 runs of 0.1 s a step) = 95, less the moment that measuring took here
