"""``normstream inspect`` as a user gives it, in process: on a config alone, and on a run of ours with two streams."""

import json
import re
from pathlib import Path

import pytest
from benchmarks.tiny_models import tiny_config

from normstream.cli import main
from normstream.inspect.report import render

TRAIN: str = (
    "train --out run --data text.txt --steps 1 --batch-size 1 --data.seq-len 16 --device cpu --model.dim 16 "
    "--model.n-layers 2 --model.n-heads 2 --model.ffn-dim 32 --model.max-seq-len 64 --model.placement siamese"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


@pytest.fixture
def gemma(folder: Path) -> Path:
    """A config alone: no weights beside it."""
    config = tiny_config("gemma2")
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(folder / "gemma")
    return folder / "gemma"


@pytest.fixture
def llama(folder: Path) -> Path:
    config = tiny_config("llama")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "llama")
    return folder / "llama"


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_config_alone(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table, inspection.json and report.html; Gemma 2's misleading name comes out as attention's output norm."""
    main(["inspect", str(gemma), "--tokens", "20"])
    printed = capsys.readouterr().out
    assert re.search(r"^output +mixer +model.layers.\*.post_attention_layernorm +RMS +1 \+ w", printed, re.M)
    assert re.search(r"^pre +feed-forward +model.layers.\*.pre_feedforward_layernorm", printed, re.M)
    assert "The weights are drawn" in printed
    assert "is not what is added to the stream: a tool that takes it is wrong by up to" in printed
    found = json.loads(Path("runs/inspect-gemma/inspection.json").read_text(encoding="utf-8"))
    assert found["model"]["tokens"] == 19
    assert found["model"]["weights"] == "drawn"
    assert len(found["sublayers"]) == 2 * len(found["layers"]) == 2 * 4
    assert all(row["true"] < 1e-5 < 0.1 < row["naive"] for row in found["identity"])
    assert {site["place"] for site in found["anatomy"]["stacks"][0]["norms"]} == {"pre", "output", "final"}
    html = Path("runs/inspect-gemma/report.html").read_text(encoding="utf-8")
    assert 'class="wiring"' in html
    assert "post_attention_" in html


def test_json_alone(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(llama), "--tokens", "8", "--attention", "sdpa", "--dtype", "float64", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["attention"], found["model"]["dtype"]) == ("sdpa", "float64")
    assert not Path("runs").exists()


def test_own_run_with_two_streams(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("the norm of a residual stream is read by every layer and joined again\n" * 40)
    main(TRAIN.split())
    capsys.readouterr()
    main(["inspect", "run", "--text", "the norm of a residual stream", "--out", "seen"])
    printed = capsys.readouterr().out
    assert "stream x\n" in printed
    assert "stream y\n" in printed
    found = json.loads(Path("seen/inspection.json").read_text(encoding="utf-8"))
    assert found["model"]["text"] == "the norm of a residual stream"
    assert {row["stream"] for row in found["sublayers"]} == {"x", "y"}
    assert [row["layer"] for row in found["ratios"]] == [0, 1]
    assert {row["stream"] for row in found["lens"]} == {"x", "y", "x+y"}
    assert found["wiring"][0]["streams"] == ["x", "y"]


def test_mistakes(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gemma exists already and is not overwritten" in refused(f"inspect {gemma} --out gemma", capsys)
    assert "text and text_file are both given" in refused(f"inspect {gemma} --text a --text-file b", capsys)
    assert "tokenizer" in refused(f"inspect {gemma} --text words --out seen", capsys)
    assert "no-such-model" in refused("inspect ./no-such-model", capsys)
    assert not Path("seen").exists()


def test_python_interface(gemma: Path) -> None:
    import normstream

    inspection = normstream.inspect.inspect_model(normstream.checkpoints.load_source(gemma), n_tokens=8)
    assert inspection.loss is not None
    assert inspection.notes == ()
    assert "Gemma" not in render(inspection)
