"""What a user does with several commands after one another: every folder is read by plain transformers or by a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from safetensors.torch import load_file
from torch import Tensor

from normstream.checkpoints import load_source
from normstream.checkpoints.conversion.checkpoint import convert_checkpoint
from normstream.checkpoints.rescaling.checkpoint import rescale_checkpoint
from normstream.checkpoints.source import quiet_transformers
from normstream.training import load_model


def saved(family: str, folder: Path, max_shard_size: str = "5GB") -> Path:
    with quiet_transformers():
        tiny_model(family).save_pretrained(folder, max_shard_size=max_shard_size)  # type: ignore[operator]
    return folder


def in_transformers(family: str, folder: Path) -> Any:
    kind: Any = type(tiny_model(family))
    with quiet_transformers():
        return kind.from_pretrained(folder, attn_implementation="eager").eval()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_file_is_the_same_through_every_entry_point(tmp_path: Path) -> None:
    """FR-03: zero-centred gains are shifted in one place or in none, whoever loads them."""
    source = saved("gemma2", tmp_path / "source")
    convert_checkpoint(source, tmp_path / "run", "normstream")
    ours = load_model(tmp_path / "run")
    assert same(load_source(tmp_path / "run").model.state_dict(), ours.state_dict())
    convert_checkpoint(tmp_path / "run", tmp_path / "back", "hf")
    theirs = in_transformers("gemma2", tmp_path / "back")
    assert same(load_source(tmp_path / "back").model.state_dict(), theirs.state_dict())
    assert same(theirs.state_dict(), tiny_model("gemma2").state_dict())
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_grouped_queries_from_shards_to_shards(tmp_path: Path) -> None:
    """Llama's matrices by their names, and Megatron's rows by hand: two groups of two query heads of width 8."""
    source = saved("llama", tmp_path / "source", max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    convert_checkpoint(source, tmp_path / "megatron", "megatron-fused", max_shard_bytes=20_000)
    shards = sorted((tmp_path / "megatron").glob("model-*.safetensors"))
    assert len(shards) > 1
    found = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    theirs = tiny_model("llama").state_dict()
    for index in range(4):
        layer, decoder = f"model.layers.{index}", f"decoder.layers.{index}"
        q, k, v = (theirs[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkv")
        rows = torch.cat([q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]])
        assert torch.equal(found[f"{decoder}.self_attention.linear_qkv.weight"], rows)
        gate_up = torch.cat([theirs[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(found[f"{decoder}.mlp.linear_fc1.weight"], gate_up)
        assert torch.equal(
            found[f"{decoder}.mlp.linear_fc1.layer_norm_weight"], theirs[f"{layer}.post_attention_layernorm.weight"]
        )
    convert_checkpoint(tmp_path / "megatron", tmp_path / "back", "hf")
    assert same(in_transformers("llama", tmp_path / "back").state_dict(), theirs)


@pytest.mark.parametrize(("family", "layers"), [("glm4", ["model.layers"]), ("t5", ["encoder.block", "decoder.block"])])
def test_every_layer_of_the_written_model_is_smaller_by_the_power(
    tmp_path: Path, family: str, layers: list[str]
) -> None:
    """The stream is seen by hooks of our own, in models that transformers has loaded."""
    source = saved(family, tmp_path / "source")
    rescale_checkpoint(source, tmp_path / "new", k=3)
    tokens = {"input_ids": torch.arange(5, 22)[None]}
    if family == "t5":
        tokens["decoder_input_ids"] = torch.arange(40, 53)[None]
    streams, logits = [], []
    for folder in ("source", "new"):
        model, seen = in_transformers(family, tmp_path / folder), []

        def keep(module: Any, args: Any, output: Any, seen: list[Tensor] = seen) -> None:
            seen.append(output[0] if isinstance(output, tuple) else output)

        for name in layers:
            for layer in model.get_submodule(name):
                layer.register_forward_hook(keep)
        with torch.no_grad():
            logits.append(model(**tokens).logits)
        streams.append(seen)
    assert torch.equal(*logits)
    assert len(streams[0]) == len(streams[1]) >= 4
    assert all(torch.equal(new * 8, old) for old, new in zip(*streams, strict=True))


def test_the_mark_of_rescaling_survives_conversion(tmp_path: Path) -> None:
    """FR-12 d: by way of Megatron's names and back it is still refused a second time."""
    rescale_checkpoint(saved("gemma2", tmp_path / "source"), tmp_path / "new", k=3)
    convert_checkpoint(tmp_path / "new", tmp_path / "megatron", "megatron")
    convert_checkpoint(tmp_path / "megatron", tmp_path / "back", "hf")
    with pytest.raises(ValueError, match="rescaled"):
        rescale_checkpoint(tmp_path / "back", None, k=1)
