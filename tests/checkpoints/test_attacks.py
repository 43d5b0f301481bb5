"""Hostile and clumsy inputs of the commands on checkpoints: each is one clear sentence, and nothing is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from normstream.checkpoints.fill import not_finite
from normstream.checkpoints.source import load_source, quiet_transformers
from normstream.cli import main

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    with quiet_transformers():
        model: Any = tiny_model("llama")
        model.save_pretrained(folder)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any], **metadata: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt", **metadata})


def refused(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


# config.json


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": 5}, "model_type must be a name such as llama, got 5"),
        ({"quantization_config": "int8"}, "quantised .int8."),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number of at least 0, got None"),
        ({"rms_norm_eps": -1e-3}, "rms_norm_eps must be a number of at least 0, got -0.001"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number of at least 0, got '1e-5'"),
        ({"hidden_size": "wide"}, "'hidden_size': .*expected int, got str"),
        ({"num_key_value_heads": 0}, "LlamaForCausalLM cannot be made from this config.json"),
        ({"architectures": ["BertModel"]}, "BertModel cannot be made from this config.json"),
    ],
)
def test_wrong_values_of_a_config_are_named(llama: Path, values: dict[str, Any], message: str) -> None:
    change_config(llama, **values)
    with pytest.raises(ValueError, match=message):
        load_source(llama)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": None},
        {"quantization_config": None},
        {"architectures": ["logging"]},  # a module of transformers
        {"architectures": ["AutoConfig"]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [None]},
    ],
)
def test_what_a_config_leaves_open_is_found_out(llama: Path, values: dict[str, Any]) -> None:
    if values.get("model_type", "") is None:
        values = values | {"architectures": ["LlamaForCausalLM"]}
    change_config(llama, **values)
    assert type(load_source(llama).model).__name__ == "LlamaForCausalLM"


# Tensors


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("verify", ["--verify", "--no-verify"])
def test_quantised_tensors_are_not_converted(llama: Path, tmp_path: Path, dtype, verify, capsys) -> None:
    """Fused with a float matrix, int8 would become float unnoticed, and float8 could not be fused at all."""
    change_tensors(llama, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    said = refused(["convert", llama, tmp_path / "out", "--to", "megatron", verify], capsys)
    assert f"{UP} has the dtype {str(dtype).removeprefix('torch.')}" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_tensors_that_are_not_finite_are_named(llama: Path, tmp_path: Path, value: float, capsys) -> None:
    change_tensors(llama, lambda tensors: tensors[UP][0].fill_(value))
    assert f"NaN or infinity in: {UP}" in refused(["convert", llama, tmp_path / "out", "--to", "hf"], capsys)
    assert load_source(llama).notes == (f"not finite numbers: {UP}",)
    assert not_finite(load_file(llama / "model.safetensors")) == [UP]


# Metadata: what one command writes, another one reads


def test_folded_and_pruned_models_are_converted(llama: Path, tmp_path: Path, capsys) -> None:
    main(["fold", str(llama), "--out", str(tmp_path / "folded")])
    main(["prune", str(llama), "--out", str(tmp_path / "pruned")])
    main(["convert", str(tmp_path / "folded"), str(tmp_path / "ours"), "--to", "normstream"])
    main(["convert", str(tmp_path / "pruned"), str(tmp_path / "megatron"), "--to", "megatron"])
    assert capsys.readouterr().out.count("equal bit by bit") == 2


@pytest.mark.parametrize("text", ["folded", "[]", "5", '{"norms": 5}', '{"norms": {"bad": {"gain": "odd"}}}'])
def test_metadata_of_others_is_no_record_of_a_conversion(llama: Path, tmp_path: Path, text: str, capsys) -> None:
    change_tensors(llama, lambda tensors: None, normstream=text)
    main(["convert", str(llama), str(tmp_path / "out"), "--to", "megatron"])
    assert "equal bit by bit" in capsys.readouterr().out


# Configurations of other formats


@pytest.mark.parametrize("lost", ["layernorm_epsilon", "rotary_base", "num_layers", "num_attention_heads"])
def test_arguments_of_megatron_are_not_filled_in(llama: Path, tmp_path: Path, lost: str, capsys) -> None:
    """A default eps or theta would be another function, which no comparison of the two sides could show."""
    main(["convert", str(llama), str(tmp_path / "megatron"), "--to", "megatron"])
    values = json.loads((tmp_path / "megatron" / "megatron.json").read_text())
    del values["arguments"][lost]
    (tmp_path / "megatron" / "megatron.json").write_text(json.dumps(values))
    said = refused(["convert", tmp_path / "megatron", tmp_path / "back", "--to", "hf"], capsys)
    assert f"the arguments of the model lack {lost}" in said


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("megatron.json", '{"family": "llama", "arguments": 5}', "expected a family's name, and objects"),
        ("megatron.json", '{"family": 5, "arguments": {}}', "expected a family's name, and objects"),
        ("normstream.json", "{}", "has no family and settings"),
        ("normstream.json", '{"family": "bert", "settings": 5}', "has no family and settings"),
        ("config.yaml", "model: 5", "has no configuration of a model"),
        ("config.yaml", "!!python/object/apply:os.system ['exit 1']", "could not determine a constructor"),
    ],
)
def test_broken_configurations(tmp_path: Path, name: str, text: str, message: str, capsys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"transformer.blocks.0.attn_y_norm.weight": torch.ones(2)}, folder / "model.safetensors")
    (folder / name).write_text(text)
    assert message in refused(["convert", folder, tmp_path / "out", "--to", "hf"], capsys)


# Words


def test_clumsy_words(llama: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert "expected the folder" in refused(["convert", llama / "config.json", out, "--to", "hf"], capsys)
    for size in ("0", "-1", "nan", "inf"):
        assert "max_shard_gb must be above 0 and finite" in refused(
            ["convert", llama, out, "--to", "hf", f"--max-shard-gb={size}"], capsys
        )
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    said = refused(["prune", llama, "--out", out, "--text-file", tmp_path / "latin.txt"], capsys)
    assert "latin.txt as a UTF-8 text" in said
    assert not out.exists()


def test_drawn_weights_are_said_to_be(llama: Path, tmp_path: Path, capsys) -> None:
    main(["fold", str(llama / "config.json"), "--out", str(tmp_path / "folded")])
    assert "there are no weights, only a config: they are drawn" in " ".join(capsys.readouterr().out.split())
