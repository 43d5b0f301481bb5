import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from normstream import DecoderConfig, DecoderLM, initialize
from normstream.optim import OptimizerConfig, build_optimizer
from normstream.training import (
    config_to_dict,
    find_checkpoint,
    list_checkpoints,
    load_model,
    read_checkpoint,
    read_checkpoint_config,
)
from normstream.training.checkpoint import (
    load_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
    remove_leftovers,
    save_checkpoint,
)


@pytest.fixture
def model() -> DecoderLM:
    made = DecoderLM(DecoderConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, max_seq_len=128, tied=True))
    initialize(made, seed=0)
    return made


def save(model: DecoderLM, folder: Path, step: int, keep: int = 9, tokenizer: str | None = None) -> Path:
    state = {
        "config": {"model": config_to_dict(model.config)},
        "corpus_hash": "0" * 64,
        "metrics_bytes": 0,
        "scaler": {},
        "progress": {"step": step},
    }
    return save_checkpoint(folder, step, model_tensors(model), {}, state, keep, tokenizer)


def test_model_comes_back(model: DecoderLM, tmp_path: Path):
    path = save(model, tmp_path, 3)
    loaded = load_model(path)
    tokens = torch.arange(6).view(2, 3)
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.lm_head.weight is loaded.tok_embeddings.weight
    assert not loaded.training
    assert read_checkpoint(path).step == 3


def test_optimizer_comes_back():
    layers = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [build_optimizer(layer, OptimizerConfig()) for layer in layers]
    for step in range(5):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            layer.weight.grad = torch.arange(4.0)[None] + step
            optimizer.step()
        if step == 2:
            fresh = build_optimizer(layers[1], OptimizerConfig())
            load_optimizer_tensors(fresh, {k: v.clone() for k, v in optimizer_tensors(optimizers[1]).items()})
            optimizers[1] = fresh
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_newest_are_kept(model: DecoderLM, tmp_path: Path):
    for step in (1, 2, 10, 100):
        save(model, tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000010", "step_00000100"]
    assert len(list(tmp_path.iterdir())) == 2
    assert find_checkpoint(tmp_path).name == "step_00000100"


def test_nothing_is_overwritten(model: DecoderLM, tmp_path: Path):
    path = save(model, tmp_path, 3)
    before = (path / "state.json").read_bytes()
    with pytest.raises(OSError, match="could not save"):
        save(model, tmp_path, 3)
    assert (path / "state.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000003"]


def test_other_format(model: DecoderLM, tmp_path: Path):
    path = save(model, tmp_path, 3)
    state = json.loads((path / "state.json").read_text()) | {"format": 2}
    (path / "state.json").write_text(json.dumps(state))
    for read in (load_model, read_checkpoint):
        with pytest.raises(ValueError, match="format 2; this version of normstream reads 1"):
            read(path)


def test_tokenizer_is_verified(model: DecoderLM, tmp_path: Path):
    path = save(model, tmp_path, 3, tokenizer='{"a": 1}')
    digests = json.loads((path / "state.json").read_text())["sha256"]
    assert digests["tokenizer.json"] == hashlib.sha256(b'{"a": 1}').hexdigest()
    assert read_checkpoint_config(path).data.tokenizer == str(path / "tokenizer.json")
    for damage in ((path / "tokenizer.json").write_text, lambda _: (path / "tokenizer.json").unlink()):
        damage('{"a": 2}')
        for read in (read_checkpoint, read_checkpoint_config):
            with pytest.raises(ValueError, match=r"tokenizer\.json is (not what was saved|missing)"):
                read(path)


def test_bytes_need_no_tokenizer_file(model: DecoderLM, tmp_path: Path):
    assert read_checkpoint_config(save(model, tmp_path, 3)).data.tokenizer == "bytes"


@pytest.mark.parametrize("key", ["step", "sha256", "config", "corpus_hash", "metrics_bytes", "scaler", "progress"])
def test_state_without_a_key(key: str, model: DecoderLM, tmp_path: Path):
    path = save(model, tmp_path, 3)
    state = json.loads((path / "state.json").read_text())
    del state[key]
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=rf"state\.json is incomplete: {key} missing"):
        read_checkpoint(path)


def test_steps_that_disagree(model: DecoderLM, tmp_path: Path):
    path = save(model, tmp_path, 3).rename(tmp_path / "step_00000005")
    with pytest.raises(ValueError, match=r"step says 3, progress\.step says 3, the folder's name says 5"):
        read_checkpoint(path)
    path = path.rename(tmp_path / "best")  # a name of one's own says nothing about the step
    assert read_checkpoint(path).step == 3
    state = json.loads((path / "state.json").read_text()) | {"step": 4}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"step says 4, progress\.step says 3"):
        read_checkpoint(path)


def test_no_checkpoint(tmp_path: Path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        load_model(tmp_path / "nowhere")


def test_files_are_as_readable_as_any_other(model: DecoderLM, tmp_path: Path):
    path = save(model, tmp_path, 1)
    modes = {os.stat(path / name).st_mode for name in ("model.safetensors", "state.json", "optimizer.safetensors")}
    assert len(modes) == 1


def test_leftovers_of_a_killed_process(model: DecoderLM, tmp_path: Path):
    save(model, tmp_path, 1)
    (tmp_path / ".step_00000002.tmp").mkdir()
    (tmp_path / ".step_00000000.old").mkdir()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
