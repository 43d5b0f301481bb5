"""`normstream theory` as a user gives it."""

import json
import re
from pathlib import Path

import pytest

from normstream.cli import main
from normstream.lab.theory.report import render_theory

TINY = "theory --depths 1 2 --dim 16 --tokens 3 --seeds 0 --out runs/t"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")


def command(line: str) -> None:
    main([*line.split()])


def refused(line: str, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        command(line)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def printed(capsys):
    command(f"{TINY} --placements keel siamese(depth_scale=paper)")
    return capsys.readouterr().out


@pytest.fixture
def found(printed, tmp_path):
    return json.loads((tmp_path / "runs/t/theory.json").read_text())


def test_tables_json_and_report(found, printed, tmp_path):
    for text in ("Keel", "SiameseNorm (depth_scale=paper)", "Lemma 2", "Theorem 1", "DeepNorm's constants", "runs/t"):
        assert text in printed
    measured = [(one["placement"], one["depth"]) for one in found["measured"]]
    names = ("keel", "siamese(depth_scale=paper)", "post", "pre")
    assert measured == [(name, depth) for name in names for depth in (1, 2)]
    assert {row["placement"] for row in found["updates"]} == {*names, "deepnorm"}
    exact = [check for check in found["checks"] if "constants" in check["statement"] or "Lemma 3" in check["statement"]]
    assert len(exact) == 3
    assert all(check["holds"] for check in exact)
    html = (tmp_path / "runs/t/report.html").read_text()
    assert html == render_theory(found)


def test_report_needs_nothing_from_outside(found):
    html = render_theory(found)
    assert "://" not in html
    assert not re.search(r"<(script|iframe|img|object|embed)|@import|url\((?!#)| src=", html)
    names = ("hidden", "gradient", "jacobian", "norm-jacobian", "update", "siamese")
    assert all(f'id="{name}"' in html for name in names)
    assert html.count("<svg role") == 1 + 2 + 2 + 1 + 3 + 1
    assert "Xiong et al. 2020" in html


def test_one_depth_has_no_picture_by_depth():
    command(f"{TINY} --depths 1 --placements pre")
    html = Path("runs/t/report.html").read_text()
    assert 'id="update"' not in html
    assert html.count("<svg role") == 1 + 1 + 2 + 1 + 1


def test_decoder(tmp_path, capsys):
    command(f"{TINY} --model decoder --n-heads 2 --init xavier --placements post hyper_connections")
    found = json.loads((tmp_path / "runs/t/theory.json").read_text())
    assert [one["placement"] for one in found["measured"]] == ["post"] * 2 + ["hyper_connections"] * 2
    assert [check["holds"] for check in found["checks"]] == [True]
    assert "The one statement that was tried agrees" in capsys.readouterr().out


def test_many_placements_do_not_all_stand_out(tmp_path):
    command(f"{TINY} --placements all")
    html = (tmp_path / "runs/t/report.html").read_text()
    assert re.search(r"\d\d others", html)


def test_a_folder_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "runs/t").mkdir(parents=True)
    (tmp_path / "runs/t/theory.json").write_text("mine")
    assert "runs/t exists already; choose another one (--out)" in refused(TINY, capsys)
    assert (tmp_path / "runs/t/theory.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--placements siamse", "did you mean 'siamese'"),
        ("--placements pre pre", "placement pre is given 2 times"),
        ("--depths 0", "depths must be at least 1, got 0"),
        ("--depths 6 6", "depth 6 is given 2 times"),
        ("--seeds -1", "seeds must not be negative, got -1"),
        ("--dim 4", "dim must be at least 8, got 4"),
        ("--tokens 0", "tokens must be at least 1, got 0"),
        ("--ffn-ratio 0", "ffn_ratio must lie between 1/dim and 64, got 0"),
        ("--n-heads 8", "the simplified model has no n_heads; add --model decoder"),
        ("--init gpt2", "the simplified model has no init; add --model decoder"),
        ("--model decoder --dim 30", "dim 30 is not divisible by n_heads 4"),
    ],
)
def test_wrong_input_is_answered_before_any_work(line, message, tmp_path, capsys):
    assert message in refused(f"theory {line}", capsys)
    assert not (tmp_path / "runs").exists()
