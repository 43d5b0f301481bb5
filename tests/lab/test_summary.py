import csv
import json
import os

import pytest

from normstream.lab.summary import read_summary, table, write_summary


def test_table_has_mean_and_sample_deviation(made_up_summary):
    rows = table(made_up_summary({("pre", 0.01): [2.0, 2.2, 2.4], ("post", 0.01): [3.0, 3.24, None]}))
    pre, post = rows
    assert pre["val_loss_mean"] == pytest.approx(2.2)
    assert pre["val_loss_std"] == pytest.approx(0.2)  # sqrt((0.04 + 0 + 0.04) / 2)
    assert (post["n_seeds"], post["n_losses"], post["n_collapsed"]) == (3, 2, 1)
    assert post["val_loss_mean"] == pytest.approx(3.12)


def test_one_seed_has_no_deviation(made_up_summary):
    assert table(made_up_summary({("pre", 0.01): [2.0]}))[0]["val_loss_std"] is None


def test_table_leaves_out_what_is_not_finished(made_up_summary):
    summary = made_up_summary({("pre", 0.01): [2.0], ("post", 0.01): [2.1]})
    summary["runs"][1]["status"] = "interrupted"
    assert [row["placement"] for row in table(summary)] == ["pre"]


def test_files_can_be_read_back(summary, tmp_path):
    summary["runs"][0]["max_grad_norm"] = float("inf")
    write_summary(summary, tmp_path)
    assert read_summary(tmp_path / "summary.json")["runs"][0]["max_grad_norm"] is None
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    with open(tmp_path / "summary.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 30
    assert (lines[0]["placement"], lines[0]["seed"], lines[0]["val_loss"]) == ("pre", "0", "2.31")


def test_a_failed_write_keeps_the_old_file(summary, tmp_path, monkeypatch):
    write_summary(summary, tmp_path)
    before = (tmp_path / "summary.json").read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_summary(summary | {"command": "other"}, tmp_path)
    assert (tmp_path / "summary.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.csv", "summary.json"]


def test_refuses_another_format(tmp_path):
    (tmp_path / "summary.json").write_text('{"format": 3}')
    with pytest.raises(ValueError, match="format 3, expected 2"):
        read_summary(tmp_path / "summary.json")


def test_names_what_is_missing(summary, tmp_path):
    del summary["start"], summary["data"]["tokenizer"], summary["runs"][2]["curve"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"is incomplete: start, data\.tokenizer, runs\[2\]\.curve missing"):
        read_summary(tmp_path / "summary.json")
