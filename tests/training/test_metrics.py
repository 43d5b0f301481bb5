import math
import os
from pathlib import Path

import pytest

from normstream.training import read_metrics
from normstream.training.metrics import MetricsWriter


def test_rows_can_be_read_while_the_run_goes_on(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"kind": "train", "step": 1, "loss": 0.1 + 0.2})
    writer.write({"kind": "eval", "step": 1, "loss": 2.0})
    assert read_metrics(tmp_path / "m.jsonl", "train") == [{"kind": "train", "step": 1, "loss": 0.1 + 0.2}]
    writer.close()


def test_rows_after_the_offset_are_cut(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"kind": "train", "step": 1})
    offset = writer.sync()
    writer.write({"kind": "train", "step": 2})
    writer.close()
    writer = MetricsWriter(tmp_path / "m.jsonl", offset)
    writer.write({"kind": "train", "step": 22})
    writer.close()
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1, 22]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"kind": "train", "loss": math.nan, "rms": {"x": [math.inf, 1.0]}})
    writer.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"kind": "train", "loss": null, "rms": {"x": [null, 1.0]}}\n'


def test_file_shorter_than_the_checkpoint_says(tmp_path: Path):
    (tmp_path / "m.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="rows are missing"):
        MetricsWriter(tmp_path / "m.jsonl", 10)
    assert (tmp_path / "m.jsonl").read_text() == "{}\n"


def test_last_line_cut_off_by_a_kill_is_left_out(tmp_path: Path):
    (tmp_path / "m.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "tr')
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1]
    (tmp_path / "m.jsonl").write_text('{"kind": "tr\n{"kind": "train", "step": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_metrics(tmp_path / "m.jsonl")


@pytest.mark.parametrize("line", ["null", "[]", "3", "{}"])
def test_line_that_is_no_row(line: str, tmp_path: Path):
    (tmp_path / "m.jsonl").write_text(f'{{"kind": "train", "step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
        read_metrics(tmp_path / "m.jsonl", "train")


def test_missing_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot read metrics from .*m\.jsonl: No such file"):
        read_metrics(tmp_path / "m.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_full_disk_names_the_file(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.close()
    writer._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(OSError, match=r"cannot write metrics: No space left.*m\.jsonl"):
        writer.write({"kind": "train"})
    with pytest.raises(OSError, match="No space left"):  # what could not be written is still in the buffer
        writer.close()
