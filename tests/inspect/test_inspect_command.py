"""``normstream inspect`` as a user gives it, in process: on a config alone, and on a run of ours with two streams."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tiny_models import tiny_config

from normstream.cli import main
from normstream.inspect.report.page import render

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
    assert re.search(r"^pre +ffn +model.layers.\*.pre_feedforward_layernorm", printed, re.M)
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


def test_multipliers_of_a_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Granite's, as its config states them; logits are divided by logits_scaling."""
    config = tiny_config("granite")
    config.update(
        dict(embedding_multiplier=5.0, residual_multiplier=0.22, logits_scaling=3.0, tie_word_embeddings=True)
    )
    config.architectures = ["GraniteForCausalLM"]
    config.save_pretrained(folder / "granite")
    main(["inspect", "granite", "--tokens", "8", "--out", "seen"])
    line = "embedding x 5, residual x 0.22, logits x 0.333, head tied to the embedding"
    assert f"\n{line}\n" in capsys.readouterr().out
    assert f"E{line[1:]}." in Path("seen/report.html").read_text(encoding="utf-8")


def test_whisper(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sound into the encoder, random tokens into the decoder, of which there are fewer positions than 61."""
    from transformers import WhisperConfig

    sizes: Any = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    lengths: Any = dict(max_source_positions=30, max_target_positions=40, num_mel_bins=8)
    tokens: Any = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = WhisperConfig(d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, **sizes, **lengths, **tokens)
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(folder / "whisper")
    main(["inspect", "whisper", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == []
    assert found["placement"] == {"encoder": "pre", "decoder": "pre"}
    assert found["loss"] == pytest.approx(math.log(64), rel=0.02)  # weights near zero: all tokens alike
    assert [len(stack["layers"]) for stack in found["anatomy"]["stacks"]] == [2, 2]
    assert len(found["sublayers"]) == 2 * 2 + 2 * 3
    assert all(row["true"] < 1e-5 for row in found["identity"])


def test_mobile_bert(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bottlenecks with several feed-forwards inside: one branch, and a note; no warning about an empty matrix."""
    from transformers import MobileBertConfig

    sizes: Any = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = MobileBertConfig(vocab_size=64, embedding_size=32, intra_bottleneck_size=16, **sizes)
    config.architectures = ["MobileBertForMaskedLM"]
    config.save_pretrained(folder / "mobile")
    main(["inspect", "mobile", "--tokens", "8", "--json"])
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "a stream of its own runs inside it" in note
    assert "the branches in there could not be separated and count as one mixer" in note


def test_own_run_with_two_streams(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("the norm of a residual stream is read by every layer and joined again\n" * 40)
    main(TRAIN.split())
    capsys.readouterr()
    main(["inspect", "run", "--text", "the norm of a residual stream", "--out", "seen"])
    printed = capsys.readouterr().out
    assert "stream x, rms and max |h| before the norm on the stream\n" in printed
    assert "stream y\n" in printed
    assert "head not tied to the embedding" in printed
    found = json.loads(Path("seen/inspection.json").read_text(encoding="utf-8"))
    assert found["model"]["text"] == "the norm of a residual stream"
    assert {row["stream"] for row in found["sublayers"]} == {"x", "y"}
    assert [row["layer"] for row in found["ratios"]] == [0, 1]
    for layer in found["layers"]:
        by_stream, gradients = layer["influence_by_stream"], layer["stream_gradient_norms"]
        assert by_stream.keys() == gradients.keys() == {"x", "y"}
        assert sum(by_stream.values()) / 2 == pytest.approx(layer["influence"])
        assert sum(norm**2 for norm in gradients.values()) == pytest.approx(layer["stream_gradient_norm"] ** 2)
    assert {row["stream"] for row in found["lens"]} == {"x", "y", "x+y"}
    assert found["wiring"][0]["streams"] == ["x", "y"]


def test_mistakes(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gemma exists already and is not overwritten" in refused(f"inspect {gemma} --out gemma", capsys)
    assert "text and text_file are both given" in refused(f"inspect {gemma} --text a --text-file b", capsys)
    assert "tokenizer" in refused(f"inspect {gemma} --text words --out seen", capsys)
    assert "no-such-model" in refused("inspect ./no-such-model", capsys)
    without = refused(f"inspect {gemma} --attention sdpa --json", capsys)
    assert without == "error: transformers has no sdpa attention for Gemma2ForCausalLM: use --attention eager"
    assert not Path("seen").exists()


def test_python_interface(gemma: Path) -> None:
    import normstream

    inspection = normstream.inspect.inspect_model(normstream.checkpoints.load_source(gemma), n_tokens=8)
    assert inspection.loss is not None
    assert inspection.notes == ()
    assert "Gemma" not in render(inspection)
