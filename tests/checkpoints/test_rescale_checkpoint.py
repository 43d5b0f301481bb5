"""Rescaled folders: what is in them, that plain transformers loads them, and the command."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.tiny_models import tiny_config, tiny_model
from rich.console import Console

from normstream.checkpoints.precise import difference, exact_answer
from normstream.checkpoints.rescaling.checkpoint import rescale_checkpoint
from normstream.checkpoints.rescaling.command import Rescale
from normstream.checkpoints.rescaling.report import tables
from normstream.checkpoints.source import LoadedModel, quiet_transformers
from normstream.checkpoints.tensors import read_metadata, read_tensors
from normstream.inspect.inputs import make_inputs


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    with quiet_transformers():
        tiny_model(family, dtype=dtype).save_pretrained(folder)  # type: ignore[operator]
    return folder


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mixtral", "granite"])
def test_folder_is_the_same_function_in_plain_transformers(tmp_path: Path, family: str) -> None:
    source = saved(family, tmp_path / "source")
    report = rescale_checkpoint(source, tmp_path / "new", k=6)
    kind: Any = type(tiny_model(family))
    with quiet_transformers():
        old, new = (kind.from_pretrained(tmp_path / name).eval() for name in ("source", "new"))
    inputs = make_inputs(old, seed=7)
    error = difference(exact_answer(new, inputs), exact_answer(old, inputs))
    assert error < 1e-5 if family == "gemma2" else error == 0
    assert report.peak_after == pytest.approx(report.peak_before / 64, rel=1e-5)


def test_mark_is_in_the_config_and_in_the_tensors_and_refused(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    rescale_checkpoint(source, tmp_path / "new", k=3)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["normstream_rescale"]["k"] == 3
    assert read_metadata(tmp_path / "new")["normstream_rescale"] == "3"
    with pytest.raises(ValueError, match="rescaled"):
        rescale_checkpoint(tmp_path / "new", None, k=1)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    del config["normstream_rescale"]
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="rescaled already"):
        rescale_checkpoint(tmp_path / "new", None, k=1)


def test_mark_survives_transformers(tmp_path: Path) -> None:
    rescale_checkpoint(saved("llama", tmp_path / "source"), tmp_path / "new", k=3)
    with quiet_transformers():
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new").save_pretrained(tmp_path / "resaved")
    with pytest.raises(ValueError, match=r"rescaled by 2\^3 already"):
        rescale_checkpoint(tmp_path / "resaved", None, k=1)


@pytest.mark.parametrize(("family", "in_float32"), [("llama", 0), ("gemma2", 9)])
def test_stored_dtype_is_kept_where_it_holds_the_values(tmp_path: Path, family: str, in_float32: int) -> None:
    """Powers of two are exact in bfloat16; the eight output norms and the final norm of Gemma 2 are 1 + w."""
    source = saved(family, tmp_path / "source", torch.bfloat16)
    rescale_checkpoint(source, tmp_path / "new", k=6)
    dtypes = [tensor.dtype for tensor in read_tensors(tmp_path / "new").values()]
    assert dtypes.count(torch.float32) == in_float32
    assert dtypes.count(torch.bfloat16) == len(dtypes) - in_float32
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["dtype"] == ("float32" if in_float32 else "bfloat16")


def test_existing_folder_stays(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    before = (source / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        rescale_checkpoint(source, source, k=2)
    assert (source / "model.safetensors").read_bytes() == before


def test_nothing_is_left_of_a_refused_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fixed in the model's code"):
        rescale_checkpoint(saved("olmo", tmp_path / "source"), tmp_path / "new", k=6)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_config_alone(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    report = rescale_checkpoint(tmp_path / "config.json", None, k=2)
    assert report.error_fp64 == 0


def test_own_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LoadedModel(torch.nn.Identity(), None, None, "checkpoint", "runs/train", is_ours=True)
    monkeypatch.setattr("normstream.checkpoints.rescaling.checkpoint.load_source", lambda *_: own)
    with pytest.raises(ValueError, match="run of normstream"):
        rescale_checkpoint(tmp_path, None, k=2)


# The report and the command


def test_report_as_json_and_table(tmp_path: Path) -> None:
    report = rescale_checkpoint(saved("gemma2", tmp_path / "source"), tmp_path / "new", k=6)
    written = json.loads((tmp_path / "new" / "rescale.json").read_text())
    assert written == json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (written["k"], len(written["peaks"])) == (6, 4)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(tables(report))
    text = console.export_text()
    assert "h / 2^6" in text
    assert "1 + w gains" in text
    assert "rms_norm_eps" in text


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved("llama", tmp_path / "source")
    Rescale(str(source), out=tmp_path / "new", k=6)()
    assert f"Written: {tmp_path / 'new'}" in capsys.readouterr().out
    assert (tmp_path / "new" / "model.safetensors").is_file()
    Rescale(str(source), dry_run=True, k=2, json=True)()
    assert json.loads(capsys.readouterr().out)["k"] == 2


def test_command_takes_one_text() -> None:
    with pytest.raises(ValueError, match="both given"):
        Rescale("model", text="a", text_file=Path("b"))()
