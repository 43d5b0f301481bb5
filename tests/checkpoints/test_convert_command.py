"""``normstream convert`` as it is called, and that what it makes works with the other commands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model

from normstream.checkpoints.conversion.files import match_family, open_checkpoint
from normstream.checkpoints.conversion.settings import decoder_settings
from normstream.checkpoints.conversion.verify import read_back
from normstream.checkpoints.source import quiet_transformers
from normstream.checkpoints.tensors import read_tensors, write_tensors
from normstream.cli import main
from normstream.data import DataConfig
from normstream.data.tokenizer import train_bpe
from normstream.models import DecoderConfig
from normstream.training import TrainConfig, train


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer of its vocabulary's size."""
    folder = tmp_path_factory.mktemp("llama") / "hf"
    with quiet_transformers():
        model: Any = tiny_model("llama")
        model.resize_token_embeddings(300)
        model.save_pretrained(folder)
    tokenizer = train_bpe([b"the quick brown fox jumps over the lazy dog " * 9], 300)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    return folder


def test_norms_are_compared_when_a_target_is_read_back(llama):
    stored = open_checkpoint(llama, "hf").stored
    read_back(llama, "hf", stored)
    other = {role: replace(norm, eps=2 * norm.eps) for role, norm in stored.norms.items()}
    with pytest.raises(ValueError, match="the configuration of hf does not hold it"):
        read_back(llama, "hf", replace(stored, norms=other))


def test_a_converted_model_is_evaluated_and_continues_a_text(llama, tmp_path, capsys):
    main(["convert", str(llama), str(tmp_path / "run"), "--to", "normstream"])
    said = capsys.readouterr().out
    assert "equal bit by bit" in said
    assert "logits" in said
    (tmp_path / "text.txt").write_text("the quick brown fox " * 200)
    main(["eval", str(tmp_path / "run"), "--data", str(tmp_path / "text.txt"), "--device", "cpu"])
    assert "perplexity" in capsys.readouterr().out
    main(["generate", str(tmp_path / "run"), "--prompt", "the", "--max-new-tokens", "3", "--device", "cpu"])
    main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf", "--from", "normstream"])
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (
        (next((tmp_path / "run" / "checkpoints").iterdir()) / "tokenizer.json").read_bytes()
    )


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(llama, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    assert refused(["convert", str(llama), str(tmp_path / "there"), "--to", "megatron"], capsys, "exists already")
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = read_tensors(llama)
    del tensors["model.layers.1.post_attention_layernorm.weight"]
    write_tensors(broken, tensors)
    (broken / "config.json").write_bytes((llama / "config.json").read_bytes())
    out = tmp_path / "out"
    assert refused(["convert", str(broken), str(out), "--to", "megatron"], capsys, "layer 1 ffn_pre_norm")
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "there"]


def test_a_format_that_cannot_be_told_is_asked_for(llama, tmp_path, capsys):
    anonymous = tmp_path / "anonymous"
    anonymous.mkdir()
    write_tensors(anonymous, {"weight": torch.ones(2)})
    said = "cannot tell the format of"
    assert refused(["convert", str(anonymous), str(tmp_path / "out"), "--to", "hf"], capsys, said)


def test_an_unknown_model_type_names_the_nearest(tmp_path, capsys):
    folder = tmp_path / "opt"
    with quiet_transformers():
        model: Any = tiny_model("opt")
        model.save_pretrained(folder)
    assert refused(["convert", str(folder), str(tmp_path / "out"), "--to", "normstream"], capsys, "no role table for")


def refused(words: list[str], capsys, said: str) -> bool:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    return True


def test_a_run_of_ours_becomes_a_model_of_transformers(tmp_path, capsys):
    """A run that no other format has seen: its conventions say that it is a Llama."""
    config = TrainConfig(
        model=DecoderConfig(placement="pre", dim=32, n_layers=2, n_heads=2, max_seq_len=32),
        data=DataConfig(seq_len=32),
        steps=1,
        batch_size=2,
        eval_batches=1,
        device="cpu",
    )
    train(config, tmp_path / "run")
    main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"])
    said = capsys.readouterr().out
    assert "llama" in said
    assert "differ by" in said


def test_a_placement_that_no_release_has_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"the nearest is \w+, but for placement 'siamese'"):
        match_family(decoder_settings(DecoderConfig(placement="siamese", dim=32, n_layers=2, n_heads=2)))
