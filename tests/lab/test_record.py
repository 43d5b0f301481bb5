import json

import pytest

from normstream.lab.record import curve, read_run
from normstream.training import RunFolder, RunResult

RESULT = RunResult(
    steps=200, train_loss=7.0, val_loss=6.9, best_val_loss=3.0, diverged=True, diverged_step=90, cause="loss above",
    collapsed=True, baseline_loss=3.2, metrics={"accuracy": 50.0},
    spikes=0, skipped=0, tokens_per_second=1.0, seconds=1.0, parameters=1,
    non_embedding_parameters=1,
)  # fmt: skip


def rows(n: int) -> list[dict]:
    return [{"kind": "train", "step": i, "loss": float(i), "grad_norm": 1.0 / i} for i in range(1, n + 1)]


def test_short_curves_are_kept_whole():
    thin = curve(rows(60), steps=60)
    assert thin["step"] == list(range(1, 61))
    assert thin["train_loss"] == [float(i) for i in range(1, 61)]


def test_long_curves_keep_means_and_peaks():
    thin = curve(rows(250), steps=250)  # ceil(250 / 100) = 3 steps a point
    assert thin["step"][:2] == [3, 6]
    assert thin["step"][-1] == 250
    assert thin["train_loss"][:2] == [2.0, 5.0]  # (1 + 2 + 3) / 3, (4 + 5 + 6) / 3
    assert thin["grad_norm"][:2] == [1.0, 0.25]  # the largest of 1/1 1/2 1/3, of 1/4 1/5 1/6


def test_missing_numbers_stay_missing():
    thin = curve([{"kind": "train", "step": 1, "loss": None, "grad_norm": None}], steps=10)
    assert (thin["train_loss"], thin["grad_norm"]) == ([None], [None])


def test_a_folder_that_does_not_exist_is_a_pending_run(tmp_path):
    entry = read_run(tmp_path / "none", steps=10)
    assert (entry["status"], entry["val_loss"], entry["layers"]) == ("pending", None, None)
    assert entry["curve"]["step"] == []


def test_a_run_that_diverged_is_not_counted_as_collapsed_too(tmp_path):
    RunFolder(tmp_path).write_result(RESULT)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows(1)[0]) + "\n")
    entry = read_run(tmp_path, steps=200)
    assert (entry["status"], entry["diverged"], entry["collapsed"]) == ("finished", True, False)


@pytest.mark.parametrize("rows", [None, "", '{"kind": "eval", "step": 1, "loss": 2.0}\n'])
def test_a_run_that_ended_has_training_rows(tmp_path, rows):
    RunFolder(tmp_path).write_result(RESULT)
    if rows is not None:
        (tmp_path / "metrics.jsonl").write_text(rows)
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no training rows although the run has ended"):
        read_run(tmp_path, steps=200)


def test_a_running_folder(tmp_path):
    last = {
        "kind": "layers",
        "step": 4,
        "grad_norm": {"embedding": 1.0, "layers": [0.5, 0.25], "head": None},
        "rms": {"x": [1, 2, 3]},
    }
    found = [*rows(4), last, {"kind": "eval", "step": 4, "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found) + '{"kind": "tr')
    entry = read_run(tmp_path, steps=10)
    assert entry["layers"] == {"step": 4, "grad_norm": [0.5, 0.25], "rms": {"x": [1, 2, 3]}}
    assert entry["max_grad_norm"] == 1.0
    assert (entry["curve"]["val_step"], entry["curve"]["val_loss"]) == ([4], [2.0])
