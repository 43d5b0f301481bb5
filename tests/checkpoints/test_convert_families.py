"""Every family of transformers to every format and back, bit by bit, with random gains and eps; and the logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_config, tiny_model
from torch import Tensor, nn

from normstream.checkpoints.conversion.checkpoint import convert_checkpoint
from normstream.checkpoints.conversion.convert import (
    HF,
    Format,
    Stored,
    family_of,
    formats,
    in_convention,
    read_tensors_of,
    write_tensors_of,
)
from normstream.checkpoints.conversion.formats.megatron import arguments
from normstream.checkpoints.conversion.roles import Role
from normstream.checkpoints.conversion.settings import decoder_config
from normstream.checkpoints.save import file_tensors
from normstream.checkpoints.source import load_source, quiet_transformers
from normstream.checkpoints.tensors import read_tensors, write_tensors
from normstream.models import DecoderLM
from normstream.norms import Gain
from normstream.training import load_model
from normstream.training.files import write_json

DECODERS = [name for name, family in HF.items() if family.conventions is not None and name != "deepseek_v3"]
NO_MEGATRON = {"olmo", "olmo2", "cohere2", "phi", "gpt_neox", "bloom", "bert", "vit"}


def stored(name: str, model: Any) -> Stored:
    one, config = family_of(name), model.config
    return read_tensors_of("hf", one, one.settings(config.to_dict()), file_tensors(model), one.gain)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("name", HF)
def test_round_trips_are_bit_identical(name):
    official, one = stored(name, tiny_model(name)), family_of(name)
    wanted = write_tensors_of("hf", official)
    skipped: set[Format] = {"megatron", "megatron-fused"} if name in NO_MEGATRON else set()
    if name == "deepseek_v3":
        skipped.add("normstream")
    assert_equal(wanted, file_tensors(tiny_model(name)))
    for target in set(formats(one)) - skipped:
        other = in_convention(official, target)
        there = write_tensors_of(target, other)
        gains: dict[Role, Gain] = {role: norm.gain for role, norm in other.norms.items()}
        back = read_tensors_of(target, one, other.settings, there, gains)
        assert_equal(write_tensors_of("hf", in_convention(back, "hf")), wanted)
    for target in skipped:
        with pytest.raises(ValueError, match=r"Megatron-Core|no place in the target|experts are not converted"):
            write_tensors_of(target, official)


def our_logits(official: Stored, tokens: Tensor) -> Tensor:
    model = DecoderLM(decoder_config(official.settings)).eval()
    parameters = dict(model.named_parameters())
    tensors = write_tensors_of("normstream", official)
    assert parameters.keys() == tensors.keys()
    with torch.no_grad():
        for key, tensor in tensors.items():
            parameters[key].copy_(tensor)
        return model(tokens)


@pytest.mark.parametrize("name", DECODERS)
def test_logits(name):
    model, tokens = tiny_model(name), torch.randint(100, (1, 31))
    with torch.no_grad():
        wanted = model(tokens).logits
    got = our_logits(stored(name, model), tokens)
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("q_rank", [16, None])
def test_logits_of_dense_deepseek_with_an_eps_of_its_own_for_latent_norms(q_rank):
    import transformers

    config = tiny_config("deepseek_v3")
    config.first_k_dense_replace, config.rms_norm_eps, config.q_lora_rank = config.num_hidden_layers, 0.1, q_rank
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model)
    tokens = torch.randint(100, (1, 31))
    with torch.no_grad():
        wanted = model(tokens).logits
    assert (our_logits(stored("deepseek_v3", model), tokens) - wanted).abs().max() < 1e-5


def randomize(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.6 * torch.rand_like(parameter) - 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


def saved(name: str, folder: Path) -> Path:
    model: Any = tiny_model(name)
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("gain", ["keep", "plain"])
def test_zero_centered_gains_as_files(tmp_path, gain):
    """FR-03: the convention is written down, and whoever loads the files gets the same function."""
    source = saved("gemma2", tmp_path / "hf")
    result = convert_checkpoint(source, tmp_path / "run", "normstream", gain=gain)
    assert result.gains == ("zero_centered" if gain == "keep" else "plain",)
    assert result.logits_error is not None
    assert result.logits_error < 1e-5
    assert result.rounding < 1e-7
    assert (result.rounding == 0) == (gain == "keep")
    by_one_way, by_another = load_model(tmp_path / "run"), load_source(tmp_path / "run").model
    assert_equal(dict(by_one_way.state_dict()), dict(by_another.state_dict()))
    convert_checkpoint(tmp_path / "run", tmp_path / "back", "hf")
    back, wanted = read_tensors(tmp_path / "back"), read_tensors(source)
    if gain == "keep":
        assert_equal(back, wanted)
    assert max((back[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-6
    assert read_config(tmp_path / "back") == read_config(source)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("name", "layout"), [("deepseek_v3", "megatron"), ("glm4", "megatron-fused")])
def test_shards_and_config_of_megatron_folders(tmp_path, name, layout):
    source = saved(name, tmp_path / "hf")
    convert_checkpoint(source, tmp_path / "megatron", layout, max_shard_bytes=20_000)
    assert len(list((tmp_path / "megatron").glob("*.safetensors"))) > 3
    index = json.loads((tmp_path / "megatron" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read_tensors(tmp_path / "megatron").keys()
    values = json.loads((tmp_path / "megatron" / "megatron.json").read_text())["arguments"]
    config = read_config(source)
    assert values["layernorm_epsilon"] == config["rms_norm_eps"]
    assert (values["num_layers"], values["hidden_size"]) == (config["num_hidden_layers"], config["hidden_size"])
    result = convert_checkpoint(tmp_path / "megatron", tmp_path / "back", "hf")
    assert result.source_format == "megatron"
    assert_equal(read_tensors(tmp_path / "back"), read_tensors(source))
    assert read_config(tmp_path / "back") == config


def test_a_megatron_folder_that_others_wrote(tmp_path):
    """Fused norms, an eps and a convention among the arguments, no metadata: family and gains must be said."""
    source = saved("llama", tmp_path / "hf")
    convert_checkpoint(source, tmp_path / "ours", "megatron-fused")
    values = json.loads((tmp_path / "ours" / "megatron.json").read_text())["arguments"]
    others = tmp_path / "others"
    others.mkdir()
    write_tensors(others, read_tensors(tmp_path / "ours"))
    write_json(others / "megatron.json", values)
    with pytest.raises(ValueError, match="does not say of which family the model is"):
        convert_checkpoint(others, tmp_path / "back", "hf")
    del values["layernorm_zero_centered_gamma"]
    (others / "megatron.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="has no layernorm_zero_centered_gamma"):
        convert_checkpoint(others, tmp_path / "back", "hf", family="llama")
    result = convert_checkpoint(others, tmp_path / "back", "hf", family="llama", stored_gain="plain")
    assert result.logits_error is not None
    assert result.logits_error < 1e-5
    assert_equal(read_tensors(tmp_path / "back"), read_tensors(source))
    wrong = {**values, "add_qkv_bias": True}
    (others / "megatron.json").write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match="add_qkv_bias is True, but a model of the family llama has False"):
        convert_checkpoint(others, tmp_path / "b", "hf", family="llama", stored_gain="plain")


def test_old_bin_files_with_buffers_and_without_a_prefix(tmp_path):
    """The first GPT-2 files: no ``transformer.``, causal masks among the tensors, PyTorch's own format."""
    source = saved("gpt2", tmp_path / "hf")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in read_tensors(source).items()}
    old = {**tensors, "h.0.attn.bias": torch.ones(1, 1, 8, 8).tril()}
    (source / "model.safetensors").unlink()
    torch.save(old, source / "pytorch_model.bin")
    result = convert_checkpoint(source, tmp_path / "run", "normstream")
    assert result.logits_error is not None
    assert "h.0.attn.bias" in result.notes[0]
    convert_checkpoint(tmp_path / "run", tmp_path / "back", "hf")
    assert_equal(read_tensors(tmp_path / "back"), tensors)


def test_a_model_without_its_head_goes_to_our_names_and_back(tmp_path):
    """A BERT that was saved without its head, as sentence encoders are; there is no class of ours for it yet."""
    import transformers

    with quiet_transformers():
        model = transformers.BertModel(tiny_config("bert")).eval()
        randomize(model)
        model.save_pretrained(tmp_path / "hf")
    result = convert_checkpoint(tmp_path / "hf", tmp_path / "names", "normstream")
    assert "names only" in result.notes[0]
    names = read_tensors(tmp_path / "names")
    assert "layers.0.after_attention.join.norm.weight" in names
    assert "pooler.weight" in names
    convert_checkpoint(tmp_path / "names", tmp_path / "back", "hf")
    assert_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf"))


def test_half_precision_stays_what_it_is(tmp_path):
    model: Any = tiny_model("llama").bfloat16()
    with quiet_transformers():
        model.save_pretrained(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "run", "normstream")
    convert_checkpoint(tmp_path / "run", tmp_path / "back", "hf")
    assert_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf"))
    assert read_config(tmp_path / "back")["dtype"] == "bfloat16"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN["original_max_position_embeddings"] = 4096
STRETCHED = {
    "llama": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    "deepseek_v3": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
}


@pytest.mark.parametrize(("name", "key"), [("llama", "rope_scaling_factor"), ("deepseek_v3", "rotary_scaling_factor")])
def test_stretched_rotary_positions_go_to_megatron_and_back(tmp_path, name, key):
    import transformers

    config = tiny_config(name)
    config.max_position_embeddings, config.rope_parameters = 163_840, dict(STRETCHED[name])
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "megatron", "megatron")
    values = json.loads((tmp_path / "megatron" / "megatron.json").read_text())["arguments"]
    assert values[key] == STRETCHED[name]["factor"]
    convert_checkpoint(tmp_path / "megatron", tmp_path / "back", "hf")
    assert read_config(tmp_path / "back") == read_config(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"(experts|stretched rotary positions .*) are not converted to normstream"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "run", "normstream")


def test_rotary_positions_that_megatron_cannot_stretch_are_refused(tmp_path):
    config = tiny_config("llama").to_dict()
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    one = family_of("llama")
    settings = one.settings(config)
    assert one.config(settings)["rope_parameters"] == config["rope_parameters"]
    with pytest.raises(ValueError, match="no argument for rotary positions stretched"):
        arguments(settings, zero_centered=False)
