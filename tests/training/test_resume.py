"""An interrupted and resumed run equals the uninterrupted one to the last bit."""

import json
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normstream.data import Data
from normstream.optim import OptimizerConfig, QKClipConfig, ScheduleConfig
from normstream.optim.config import Kind
from normstream.training import (
    Interrupted,
    TrainConfig,
    config_to_yaml,
    list_checkpoints,
    loop,
    read_checkpoint,
    read_metrics,
    train,
)

Make = Callable[..., TrainConfig]
SCRIPT = Path(__file__).with_name("interrupted_run.py")


def rows(run: Path) -> list[dict[str, Any]]:
    found = read_metrics(run / "metrics.jsonl")
    for row in found:
        row.pop("tokens_per_second", None)
    return found


def result(run: Path) -> dict[str, Any]:
    found = json.loads((run / "result.json").read_text())
    return {key: value for key, value in found.items() if key not in ("seconds", "tokens_per_second")}


def assert_same_run(first: Path, second: Path) -> None:
    assert rows(first) == rows(second)
    assert result(first) == result(second)
    one, two = (read_checkpoint(list_checkpoints(run / "checkpoints")[-1]) for run in (first, second))
    assert one.step == two.step
    for a, b in ((one.model, two.model), (one.optimizer, two.optimizer)):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def stop_at(step: int, number: signal.Signals = signal.SIGTERM) -> Callable[[dict[str, Any]], None]:
    def on_row(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == step:
            signal.raise_signal(number)

    return on_row


@pytest.fixture
def thorough(config: Make) -> TrainConfig:
    """Everything that could be random or stateful."""
    return config(dropout=0.1, drop_path=0.1, grad_accumulation=2, warmup=3)


def test_stopped_at_every_step(thorough: TrainConfig, data: Data, tmp_path: Path):
    train(thorough, tmp_path / "whole", data=data)
    run = tmp_path / "stopped"
    for step in range(1, thorough.steps):
        with pytest.raises(Interrupted) as stopped:
            train(thorough, run, data=data, resume=step > 1, on_row=stop_at(step))
        assert (stopped.value.step, stopped.value.code) == (step, 143)
        assert not (run / "result.json").exists()
    train(thorough, run, data=data, resume=True)
    assert_same_run(tmp_path / "whole", run)


@pytest.mark.parametrize(("name", "step", "status", "resumes_after"), [("SIGTERM", 7, 143, 7), ("SIGKILL", 8, -9, 5)])
def test_process_that_is_stopped_or_killed(
    name: str, step: int, status: int, resumes_after: int, thorough: TrainConfig, tmp_path: Path
):
    train(thorough, tmp_path / "whole")
    (tmp_path / "config.yaml").write_text(config_to_yaml(thorough))
    run = tmp_path / "stopped"
    process = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "config.yaml", run, name, str(step)], capture_output=True, text=True
    )
    assert process.returncode == status, process.stderr
    assert rows(run)[-1]["step"] in (step, step - 1)
    assert read_checkpoint(list_checkpoints(run / "checkpoints")[-1]).step == resumes_after
    seen: list[dict[str, Any]] = []
    train(thorough, run, resume=True, on_row=seen.append)
    assert seen[0]["step"] == resumes_after + 1
    assert_same_run(tmp_path / "whole", run)


def test_fp16_scale_and_skips_resume(config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, 2.0**40, enabled=enabled))
    fp16 = config(precision="fp16", steps=24, placement="pre")
    train(fp16, tmp_path / "whole", data=data)
    run = tmp_path / "stopped"
    for step in (1, 9):
        with pytest.raises(Interrupted):
            train(fp16, run, data=data, resume=step > 1, on_row=stop_at(step))
    train(fp16, run, data=data, resume=True)
    assert_same_run(tmp_path / "whole", run)


@pytest.mark.parametrize("kind", ["radam", "sgd", "muon", "muonclip"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_optimizer_resumes(kind: Kind, precision: str, config: Make, data: Data, tmp_path: Path):
    optimizer = OptimizerConfig(kind=kind, lr=1e-2, qk_clip=QKClipConfig(threshold=0.1 if kind == "muonclip" else None))
    options = config(optimizer=optimizer, precision=precision, placement="pre", grad_accumulation=2, z_loss=1e-4)
    train(options, tmp_path / "whole", data=data)
    run = tmp_path / "stopped"
    for step in (4, 7):
        with pytest.raises(Interrupted):
            train(options, run, data=data, resume=step > 4, on_row=stop_at(step))
    train(options, run, data=data, resume=True)
    assert_same_run(tmp_path / "whole", run)
    if kind == "muonclip":
        assert sum(row["clipped_heads"] for row in read_metrics(run / "metrics.jsonl", "train")) > 0


def test_ctrl_c_has_its_own_status(config: Make, data: Data, tmp_path: Path):
    with pytest.raises(Interrupted) as stopped:
        train(config(), tmp_path / "run", data=data, on_row=stop_at(2, signal.SIGINT))
    assert stopped.value.code == 130
    assert "SIGINT after step 2" in str(stopped.value)


def test_killed_before_the_first_checkpoint(config: Make, data: Data, tmp_path: Path):
    def fail(row: dict[str, Any]) -> None:
        if row["step"] == 3:
            raise RuntimeError("power cut")

    train(config(), tmp_path / "whole", data=data)
    with pytest.raises(RuntimeError, match="power cut"):
        train(config(), tmp_path / "run", data=data, on_row=fail)
    train(config(), tmp_path / "run", data=data, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_learning_rate_goes_on_after_resume(config: Make, data: Data, tmp_path: Path):
    """FR-19: peak 1e-3, warm-up 10, cosine to 0 at 100, four micro-batches."""
    long = config(lr=1e-3, warmup=10, final_fraction=0.0, steps=100, grad_accumulation=4, checkpoint_every=100)
    with pytest.raises(Interrupted):
        train(long, tmp_path / "run", data=data, on_row=stop_at(49))
    seen: list[dict[str, Any]] = []
    stop = stop_at(50)

    def on_row(row: dict[str, Any]) -> None:
        seen.append(row)
        stop(row)

    with pytest.raises(Interrupted):
        train(long, tmp_path / "run", data=data, resume=True, on_row=on_row)
    assert seen[0]["step"] == 50
    assert seen[0]["lr"] == pytest.approx(5.868241e-4, rel=1e-7)


def test_changed_schedule_needs_a_choice(config: Make, data: Data, tmp_path: Path):
    old = config(schedule=ScheduleConfig("constant"), optimizer=OptimizerConfig(lr=1e-2))
    new = replace(old, schedule=ScheduleConfig("linear", final_fraction=0.0))
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(old, run, data=data, on_row=stop_at(5))
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"schedule.kind: constant -> linear.*step 6: 0.01 -> 0.005"):
        train(new, run, data=data, resume=True)
    assert (run / "metrics.jsonl").read_bytes() == before
    train(new, run, data=data, resume=True, accept_changes=True)
    events = read_metrics(run / "metrics.jsonl", "event")
    assert [(event["step"], event["event"]) for event in events] == [(5, "config_changed")]
    assert read_metrics(run / "metrics.jsonl", "train")[5]["lr"] == pytest.approx(0.005)
    assert "kind: constant" in (run / "config_before_step_00000006.yaml").read_text()
    assert "kind: linear" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("change", [{"seed": 1}, {"dim": 16}, {"seq_len": 8}, {"batch_size": 8}])
def test_what_cannot_change_within_a_run(change: dict[str, Any], config: Make, tmp_path: Path):
    with pytest.raises(Interrupted):
        train(config(), tmp_path / "run", on_row=stop_at(5))
    with pytest.raises(ValueError, match=rf"cannot resume with another \S*{next(iter(change))}"):
        train(config(**change), tmp_path / "run", resume=True, accept_changes=True)


def test_reporting_may_change_freely(config: Make, data: Data, tmp_path: Path):
    with pytest.raises(Interrupted):
        train(config(), tmp_path / "run", data=data, on_row=stop_at(5))
    free = {"keep_checkpoints": 1, "prefetch": 0, "tune_allocator": False, "run_ahead": False}
    train(config(eval_every=2, **free), tmp_path / "run", data=data, resume=True)
    assert [p.name for p in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000012"]


def test_finished_run_returns_its_result(config: Make, data: Data, tmp_path: Path):
    first = train(config(), tmp_path / "run", data=data)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert train(config(), tmp_path / "run", data=data, resume=True) == first
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_finished_run_can_be_made_longer(config: Make, data: Data, tmp_path: Path):
    schedule = ScheduleConfig("constant")
    train(config(schedule=schedule), tmp_path / "run", data=data)
    with pytest.raises(ValueError, match="steps: 12 -> 15"):
        train(config(schedule=schedule, steps=15), tmp_path / "run", data=data, resume=True)
    longer = train(config(schedule=schedule, steps=15), tmp_path / "run", data=data, resume=True, accept_changes=True)
    assert longer.steps == 15
    assert (tmp_path / "run" / "result_after_step_00000012.json").exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", "cut"),
        ("model.safetensors", "flip"),
        ("optimizer.safetensors", "cut"),
        ("optimizer.safetensors", "gone"),
        ("state.json", "cut"),
        ("state.json", "gone"),
    ],
)
def test_damaged_checkpoint_falls_back_with_a_message(name: str, damage: str, config: Make, data: Data, tmp_path: Path):
    train(config(), tmp_path / "whole", data=data)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(config(), run, data=data, on_row=stop_at(11))
    path = run / "checkpoints" / "step_00000011" / name
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    else:
        path.unlink()
    with pytest.raises(ValueError, match=name):
        read_checkpoint(path.parent)
    with pytest.warns(UserWarning, match=rf"step_00000011.{name}.*resuming from step_00000010 instead"):
        train(config(), run, data=data, resume=True)
    assert (run / "checkpoints" / "damaged_step_00000011").is_dir()
    events = [row for row in rows(run) if row["kind"] == "event" and row["event"] == "damaged_checkpoint"]
    assert [event["step"] for event in events] == [10]
    whole, resumed = ([row for row in rows(r) if row["kind"] != "event"] for r in (tmp_path / "whole", run))
    assert resumed == whole


def test_only_damaged_checkpoints(config: Make, data: Data, tmp_path: Path):
    with pytest.raises(Interrupted):
        train(config(), tmp_path / "run", data=data, on_row=stop_at(3))
    damaged = tmp_path / "run" / "checkpoints" / "step_00000003" / "model.safetensors"
    damaged.write_bytes(b"")
    with pytest.raises(ValueError, match="no intact checkpoint"):
        train(config(), tmp_path / "run", data=data, resume=True)
    assert damaged.exists()


def test_fewer_steps_than_are_done(config: Make, data: Data, tmp_path: Path):
    train(config(), tmp_path / "run", data=data)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="has done 12 steps, so steps must be above that to go on, got 6"):
        train(config(steps=6), tmp_path / "run", data=data, resume=True, accept_changes=True)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_same_text_by_another_path(config: Make, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Interrupted):
        train(config(), tmp_path / "run", on_row=stop_at(5))
    monkeypatch.chdir(text_folder.parent)
    assert train(config(source=text_folder.name), tmp_path / "run", resume=True).steps == 12


def test_same_text_elsewhere_is_a_change(config: Make, text_folder: Path, tmp_path: Path):
    with pytest.raises(Interrupted):
        train(config(), tmp_path / "run", on_row=stop_at(5))
    shutil.copytree(text_folder, tmp_path / "copy")
    with pytest.raises(ValueError, match=r"another data\.source"):
        train(config(source=str(tmp_path / "copy")), tmp_path / "run", resume=True)


def test_tokenizer_that_is_gone_falls_back(config: Make, tmp_path: Path):
    bpe, run = config(tokenizer="bpe:260"), tmp_path / "run"
    with pytest.raises(Interrupted):
        train(bpe, run, on_row=stop_at(11))
    (run / "checkpoints" / "step_00000011" / "tokenizer.json").unlink()
    with pytest.warns(UserWarning, match=r"step_00000011.tokenizer.json is missing.*resuming from step_00000010"):
        assert train(bpe, run, resume=True).steps == 12


def test_config_survives_a_kill_while_it_is_changed(
    config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(config(), run, data=data, on_row=stop_at(5))
    old, real = (run / "config.yaml").read_text(), loop.write_text

    def killed(path: Path, text: str) -> None:
        if path.name == "config.yaml":
            raise RuntimeError("killed")
        real(path, text)

    monkeypatch.setattr(loop, "write_text", killed)
    with pytest.raises(RuntimeError, match="killed"):
        train(config(lr=5e-3), run, data=data, resume=True, accept_changes=True)
    assert (run / "config.yaml").read_text() == old
    monkeypatch.undo()
    assert train(config(lr=5e-3), run, data=data, resume=True, accept_changes=True).steps == 12
    assert (run / "config_before_step_00000006.yaml").read_text() == old
    assert "lr: 0.005" in (run / "config.yaml").read_text()


def test_other_text_is_refused(config: Make, data: Data, tmp_path: Path):
    with pytest.raises(Interrupted):
        train(config(), tmp_path / "run", data=data, on_row=stop_at(3))
    with pytest.raises(ValueError, match="the data has changed"):
        train(config(), tmp_path / "run", data=replace(data, corpus_hash="0" * 64), resume=True)


def test_resume_where_there_is_no_run(config: Make, data: Data, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with warnings.catch_warnings():
        assert train(config(steps=1), tmp_path / "empty", data=data, resume=True).steps == 1
        assert train(config(steps=1), tmp_path / "new", data=data, resume=True).steps == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"no config\.yaml"):
        train(config(), tmp_path / "other", data=data, resume=True)
