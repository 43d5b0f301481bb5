import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normstream import initialize
from normstream.data import Data, Loader
from normstream.models import build_model
from normstream.optim import ScheduleConfig
from normstream.training import (
    TrainConfig,
    config_from_yaml,
    evaluate,
    load_model,
    loop,
    read_metrics,
    train,
)

Make = Callable[..., TrainConfig]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl", "train")]


def test_run_equals_a_loop_written_by_hand(config: Make, data: Data, tmp_path: Path):
    c = config(placement="pre", warmup=3, clip=0.5, final_fraction=0.0)
    result = train(c, tmp_path / "run", data=data)

    model = build_model(c.model)
    initialize(model, c.seed)
    decayed = [p for name, p in model.named_parameters() if "norm" not in name and "embed" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name or "embed" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), foreach=False)
    loader, expected = Loader(data.train, c.batch_size, c.seed), []
    for n in range(1, 13):
        batch = loader.batch(n - 1)
        logits = model(batch.inputs_BT, documents_BT=batch.documents_BT)
        loss = F.cross_entropy(logits.transpose(1, 2), batch.targets_BT, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (n / 3 if n < 3 else (1 + math.cos(math.pi * (n - 3) / 9)) / 2)
        optimizer.step()
        expected.append((loss.item(), norm.item()))

    rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["tokens"] for row in rows] == [64 * n for n in range(1, 13)]
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    assert result.train_loss == pytest.approx(sum(loss for loss, _ in expected) / 12, rel=1e-5)
    # What was saved, loaded and evaluated is the model that was trained.
    scores = evaluate(load_model(tmp_path / "run"), data.validation, batch_size=4, batches=2)
    assert scores["loss"] == result.val_loss
    assert scores["loss"] == pytest.approx(evaluate(model, data.validation, batch_size=4, batches=2)["loss"], rel=1e-5)


def test_run_learns_and_leaves_its_files(config: Make, data: Data, tmp_path: Path):
    seen: list[dict[str, Any]] = []
    # so small a start that the first guess is nearly uniform
    result = train(config(steps=40, init_std=0.02), tmp_path / "run", data=data, on_row=seen.append)
    assert seen == read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert seen[0]["loss"] == pytest.approx(math.log(257), abs=0.2)
    assert result.val_loss is not None
    assert result.val_loss < 4.0
    assert result.best_val_loss == min(row["loss"] for row in seen if row["kind"] == "eval")
    assert [row["step"] for row in seen if row["kind"] == "eval"] == list(range(4, 41, 4))
    assert [row["step"] for row in seen if row["kind"] == "layers"] == [*range(3, 40, 3), 40]
    assert not result.diverged
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["corpus_hash"] == data.corpus_hash
    assert info["parameters"] == result.parameters
    assert result.parameters - result.non_embedding_parameters == 257 * 32
    assert json.loads((tmp_path / "run" / "result.json").read_text())["val_loss"] == result.val_loss


@pytest.mark.parametrize("wanted", [True, False])
def test_the_allocator_is_tuned_if_wanted_and_that_is_recorded(
    wanted: bool, config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = []
    monkeypatch.setattr(loop, "tune_allocator", lambda: calls.append("tuned") or "done")
    train(config(steps=1, tune_allocator=wanted), tmp_path / "run", data=data)
    assert calls == ["tuned"] * wanted
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["environment"]["allocator"] == ("done" if wanted else "left as it is, by tune_allocator")


def test_same_seed_same_run_other_seed_not(config: Make, data: Data, tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(seed + 17)  # the state around a run has no part in it
        train(config(seed=seed, dropout=0.1), tmp_path / name, data=data)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a")[0] != losses(tmp_path / "c")[0]


def test_random_state_of_the_caller_is_kept(config: Make, data: Data, tmp_path: Path):
    before = torch.get_rng_state()
    train(config(steps=1, dropout=0.1), tmp_path / "run", data=data)
    assert torch.equal(before, torch.get_rng_state())


def test_written_config_reproduces_the_run(config: Make, tmp_path: Path):
    train(config(lr=3.3e-3, dropout=0.1), tmp_path / "a")
    again = config_from_yaml((tmp_path / "a" / "config.yaml").read_text(), TrainConfig)
    train(again, tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert (tmp_path / "a" / "config.yaml").read_text() == (tmp_path / "b" / "config.yaml").read_text()


def test_run_folder_that_exists(config: Make, data: Data, tmp_path: Path):
    train(config(steps=1), tmp_path / "run", data=data)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        train(config(), tmp_path / "run", data=data)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_nothing_is_written_for_a_wrong_config(config: Make, data: Data, tmp_path: Path):
    with pytest.raises(ValueError, match="placement"):
        train(config(placement="siamse"), tmp_path / "run", data=data)
    with pytest.raises(ValueError, match="device 'gpu'"):
        train(config(device="gpu"), tmp_path / "run", data=data)
    with pytest.raises(ValueError, match="another config"):
        train(config(seq_len=8), tmp_path / "run", data=data)
    with pytest.raises(ValueError, match="no checkpoint in"):
        train(config(init_from=tmp_path / "nowhere"), tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def test_validation_text_without_a_target(config: Make, data: Data, tmp_path: Path):
    empty = replace(data.validation, tokens=np.full(200, data.validation.eot))
    with pytest.raises(ValueError, match=r"validation: .* no token to predict"):
        train(config(), tmp_path / "run", data=replace(data, validation=empty))
    assert not (tmp_path / "run").exists()


def test_vocabulary_comes_from_the_data(config: Make, data: Data, tmp_path: Path):
    train(config(vocab_size=50_000, steps=1), tmp_path / "run", data=data)
    assert load_model(tmp_path / "run").config.vocab_size == 257


def test_nan_stops_the_run_and_is_recorded(config: Make, data: Data, tmp_path: Path):
    result = train(config(placement="pre", lr=1e30, clip=None), tmp_path / "run", data=data)
    assert result.diverged
    assert result.diverged_step == result.steps + 1
    assert result.cause is not None
    assert "nan" in result.cause
    assert result.val_loss is None
    event = read_metrics(tmp_path / "run" / "metrics.jsonl", "event")[-1]
    assert event == {"kind": "event", "step": result.diverged_step, "event": "nonfinite", "cause": result.cause}
    last = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")[-1]
    assert last["step"] == result.diverged_step
    assert None in (last["loss"], last["grad_norm"])
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (saved["diverged"], saved["diverged_step"]) == (True, result.diverged_step)
    assert train(config(placement="pre", lr=1e30, clip=None), tmp_path / "run", data=data, resume=True) == result


def test_loss_above_a_guess_is_divergence(config: Make, data: Data, tmp_path: Path):
    constant = ScheduleConfig("constant")
    result = train(config(lr=3.0, steps=40, schedule=constant, placement="pre"), tmp_path / "run", data=data)
    assert result.train_loss is not None
    assert result.train_loss > math.log(257)
    assert result.diverged
    assert result.diverged_step is not None
    assert 20 <= result.diverged_step <= 40
    assert read_metrics(tmp_path / "run" / "metrics.jsonl", "event")[-1]["event"] == "diverged"


def test_full_disk_while_saving(config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from normstream.training import checkpoint

    real, calls = checkpoint.save_file, []

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) == 4:  # the optimizer of the second checkpoint
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    with pytest.raises(OSError, match=r"No space left on device.*intact checkpoints: step_00000005.*resume"):
        train(config(), tmp_path / "run", data=data)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000005"]
    monkeypatch.undo()
    train(config(), tmp_path / "run", data=data, resume=True)
    train(config(), tmp_path / "whole", data=data)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"batch_size": 3, "grad_accumulation": 2},
        {"clip": 0.0},
        {"seed": -1},
        {"prefetch": -1},
        {"recompute_every": 0},
        {"warmup": 13},
        {"seq_len": 17},
    ],
)
def test_impossible_configs(wrong: dict[str, Any], config: Make):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        config(**wrong)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near_float32(precision: str, config: Make, data: Data, tmp_path: Path):
    train(config(), tmp_path / "fp32", data=data)
    train(config(precision=precision), tmp_path / "low", data=data)
    assert losses(tmp_path / "low") != losses(tmp_path / "fp32")
    assert losses(tmp_path / "low") == pytest.approx(losses(tmp_path / "fp32"), abs=0.05)
    model = load_model(tmp_path / "low")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fp16_skips_and_lowers_the_scale(config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, 2.0**40, enabled=enabled))
    result = train(config(precision="fp16", steps=40), tmp_path / "run", data=data)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    skipped = [row["step"] for row in rows if row["grad_norm"] is None]
    assert skipped[:15] == list(range(1, 16))
    assert result.skipped == len(skipped) < 30
    for row in rows:
        so_far = sum(step <= row["step"] for step in skipped)
        assert (row["skipped"], row["loss_scale"]) == (so_far, 2.0 ** (40 - so_far))
    events = read_metrics(tmp_path / "run" / "metrics.jsonl", "event")
    assert [event["step"] for event in events if event["event"] == "skipped"] == skipped
    # The learning rate is that of the step, skipped or not.
    plain = train(config(steps=40), tmp_path / "plain", data=data)
    rates = [row["lr"] for row in read_metrics(tmp_path / "plain" / "metrics.jsonl", "train")]
    assert [row["lr"] for row in rows] == rates
    assert plain.skipped == 0


def test_fp16_that_only_skips_has_diverged(config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, 2.0**120, enabled=enabled))
    result = train(config(precision="fp16", steps=40), tmp_path / "run", data=data)
    assert (result.diverged, result.diverged_step) == (True, 25)
    assert result.cause is not None
    assert "25 updates in a row" in result.cause


def test_activation_checkpointing_changes_nothing(config: Make, data: Data, tmp_path: Path):
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "layer": {"activation_checkpointing": "layer"},
        "selective": {"activation_checkpointing": "selective"},
        "every other layer": {"activation_checkpointing": "layer", "recompute_every": 2},
    }
    for name, recomputation in options.items():
        train(config(**recomputation, dropout=0.2, drop_path=0.2), tmp_path / name, data=data)
        for kind in ("train", "layers"):
            ours, plain = (read_metrics(tmp_path / run / "metrics.jsonl", kind) for run in (name, "none"))
            for row in (*ours, *plain):
                row.pop("tokens_per_second", None)
            assert ours == plain


@pytest.mark.untyped  # the tracer cannot follow the type checks of a test run
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's tracer hides its own warnings, which "error" undoes
def test_compiled_layers(config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiled, real = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f) or real(f, backend="aot_eager"))
    train(config(steps=2), tmp_path / "plain", data=data)
    train(config(steps=2, compile=True), tmp_path / "compiled", data=data)
    assert len(compiled) == 2
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_data_order_does_not_depend_on_micro_batches(config: Make, data: Data, tmp_path: Path):
    for parts in (1, 2, 4):
        train(config(grad_accumulation=parts, steps=4), tmp_path / str(parts), data=data)
    for parts in (2, 4):
        assert losses(tmp_path / str(parts)) == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


def test_init_from_is_kept_in_the_config(config: Make, data: Data, tmp_path: Path):
    train(config(placement="pre"), tmp_path / "pre", data=data)
    c = replace(config(), init_from=tmp_path / "pre")
    train(c, tmp_path / "siamese", data=data)
    info = json.loads((tmp_path / "siamese" / "run.json").read_text())
    assert info["init_from"]["source"].endswith("step_00000012")
    assert info["init_from"]["dropped"] == []
    assert losses(tmp_path / "siamese")[0] < losses(tmp_path / "pre")[0] - 1
    assert config_from_yaml((tmp_path / "siamese" / "config.yaml").read_text(), TrainConfig).init_from == c.init_from
