from contextlib import suppress

import pytest

from normstream.lab.saver import Saver
from normstream.lab.summary import read_summary


@pytest.fixture
def reports(monkeypatch):
    """Times at which reports were begun, on a clock that each report moves on by 2 s."""
    begun = []

    def write_report(summary, path):
        begun.append(now[0])
        now[0] += 2.0

    now = [0.0]
    monkeypatch.setattr("normstream.lab.saver.write_report", write_report)
    return begun, now


def test_the_report_takes_a_small_part_of_the_time(summary, tmp_path, reports):
    """With 2 s a report and a share of 2 %, the next one is due 100 s after the last one was done."""
    begun, now = reports
    saver = Saver(summary, tmp_path, clock=lambda: now[0])
    for run in range(25):  # one ends every 10 s
        saver.save()
        now[0] += 10.0
        summary["command"] = f"after run {run}"
    saver.save()
    assert begun == [0.0, 102.0, 204.0]
    assert read_summary(tmp_path / "summary.json")["command"] == "after run 24"
    saver.report()
    assert begun[3:] == [256.0]


def test_the_last_report_is_written_once_also_after_an_error(summary, tmp_path, reports):
    begun, _ = reports
    with suppress(KeyboardInterrupt), Saver(summary, tmp_path, clock=lambda: 0.0) as saver:
        saver.save()
        assert len(begun) == 1
        saver.report_seconds = 1.0
        saver.save()
        raise KeyboardInterrupt
    assert len(begun) == 2
    saver.report()
    assert len(begun) == 2
