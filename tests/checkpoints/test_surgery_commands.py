"""The commands fold, prune and denorm, and the folders that they write."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from safetensors.torch import load_file

from normstream.checkpoints import load_source
from normstream.checkpoints.precise import answer, difference
from normstream.checkpoints.save import file_tensors, save_model
from normstream.checkpoints.source import LoadedModel, quiet_transformers
from normstream.checkpoints.surgery.commands import Denorm, Fold, Prune
from normstream.checkpoints.surgery.denorm import DenormConfig
from normstream.checkpoints.tensors import read_metadata, stored_dtype, write_tensors
from normstream.inspect.inputs import make_inputs


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = tiny_model(name, dtype=dtype)
    with quiet_transformers():
        model.save_pretrained(folder)
    return model


def loaded_again(folder: Path) -> Any:
    """As a user without normstream would."""
    import transformers

    with quiet_transformers():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager"
        )


def test_fold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save("llama", tmp_path / "model")
    (tmp_path / "model" / "vocab.txt").write_text("a\n")
    Fold(str(tmp_path / "model"), tmp_path / "folded")()
    out = capsys.readouterr().out
    assert "model.layers.*.input_layernorm" in out
    assert "in float64, by" in " ".join(out.split())
    new, inputs = loaded_again(tmp_path / "folded"), make_inputs(model)
    assert difference(answer(new, inputs), answer(model, inputs)) < 1e-5
    assert bool((new.model.norm.weight == 1).all())
    assert read_metadata(tmp_path / "folded") == {"format": "pt", "normstream_changes": "folded"}
    assert (tmp_path / "folded" / "vocab.txt").read_text() == "a\n"
    with pytest.raises(ValueError, match="exists already"):
        Fold(str(tmp_path / "model"), tmp_path / "folded")()


def test_fold_that_is_refused_writes_nothing(tmp_path: Path) -> None:
    save("bert", tmp_path / "model")
    with pytest.raises(ValueError, match="no norm of this model can be folded"):
        Fold(str(tmp_path / "model"), tmp_path / "folded")()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("gemma3_text", tmp_path / "model")
    Prune(str(tmp_path / "model"), tmp_path / "short", layers=2, tokens=31)()
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("left out") == 2
    assert "config: num_hidden_layers = 2" in out
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    assert (config["num_hidden_layers"], len(config["layer_types"])) == (2, 2)
    assert len(loaded_again(tmp_path / "short").model.layers) == 2
    assert read_metadata(tmp_path / "short")["normstream_changes"].startswith("without layers ")
    with pytest.raises(ValueError, match="both given"):
        Prune(str(tmp_path / "model"), tmp_path / "other", text="a", text_file=tmp_path / "b")()


def test_denorm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    with quiet_transformers():
        model.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("to read a stream without a norm " * 40)
    tuning = DenormConfig(*(1, 1, 1, 1, 1, 1, 2), batch_size=2, eval_batches=2, control=False)
    source = str(tmp_path / "text.txt")
    Denorm(str(tmp_path / "model"), tmp_path / "without", data=source, seq_len=16, tuning=tuning)()
    out = capsys.readouterr().out
    assert "without norms, tuned" in out
    assert "with norms, tuned as long" not in out
    new = loaded_again(tmp_path / "without")
    assert new.config.layer_norm_epsilon == 1e12
    assert 1e5 < new.transformer.h[0].ln_1.weight.abs().mean() < 1e8


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    save("llama", tmp_path / "model", torch.bfloat16)
    Fold(str(tmp_path / "model"), tmp_path / "folded")()
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "folded" / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert json.loads((tmp_path / "folded" / "config.json").read_text())["dtype"] == "bfloat16"


def test_widest_dtype(tmp_path: Path) -> None:
    assert stored_dtype(tmp_path) == torch.float32
    write_tensors(tmp_path, {"a": torch.ones(1, dtype=torch.bfloat16), "i": torch.ones(1, dtype=torch.int64)})
    assert stored_dtype(tmp_path) == torch.bfloat16


def test_dtype_that_holds_fp16_and_bfloat16(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"a": torch.ones(1, dtype=torch.bfloat16), "b": torch.ones(1, dtype=torch.float16)})
    assert stored_dtype(tmp_path) == torch.float32


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2", "bert", "t5", "vit"])
def test_saved_as_transformers_saves_it(tmp_path: Path, family: str) -> None:
    """The same tensors by the same names, single experts and one of the tied matrices included."""
    model = save(family, tmp_path / "theirs")
    loaded = load_source(tmp_path / "theirs")
    save_model(loaded, tmp_path / "ours", {"k": "v"}, max_shard_bytes=20_000)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = {name: t for path in (tmp_path / "ours").glob("*.safetensors") for name, t in load_file(path).items()}
    assert ours.keys() == theirs.keys() == file_tensors(model).keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert first == second
    assert torch.equal(*(answer(load_source(tmp_path / name).model, make_inputs(model)) for name in ("theirs", "ours")))


def test_our_runs_are_not_written(tmp_path: Path) -> None:
    loaded = LoadedModel(torch.nn.Identity(), None, None, "checkpoint", "runs/a", True)
    with pytest.raises(ValueError, match="runs/a is a run of normstream"):
        save_model(loaded, tmp_path / "out")
