"""The official SiameseNorm checkpoints: names, the swap at DeiT's end, and the golden logits after conversion."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from normstream.checkpoints.conversion.checkpoint import convert_checkpoint
from normstream.checkpoints.conversion.convert import Format, Stored, family_of, read_tensors_of, write_tensors_of
from normstream.checkpoints.conversion.settings import decoder_config
from normstream.checkpoints.tensors import read_tensors, write_tensors
from normstream.models import DecoderLM
from normstream.training import load_model
from normstream.training.files import write_json

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: dict[Format, str] = {
    "siamese-lm": "siamese_hybrid_pre_lm",
    "siamese-deit": "siamese_deit",
    "siamese-dit": "siamese_dit",
}


def golden(case: str, prefix: str) -> dict[str, Tensor]:
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def config_of(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{case}.json").read_text())["config"]


def stored(name: Format) -> Stored:
    one = family_of(name.replace("-", "_"))
    return read_tensors_of(name, one, one.settings(config_of(CASES[name])), golden(CASES[name], "param."), "plain")


@pytest.fixture(params=CASES)
def name(request) -> Format:
    return request.param


def test_round_trip(name):
    model = stored(name)
    ours = write_tensors_of("normstream", model)
    assert sum(t.numel() for t in ours.values()) == sum(t.numel() for t in model.tensors.values())
    back = write_tensors_of(name, read_tensors_of("normstream", model.family, model.settings, ours, "plain"))
    official = golden(CASES[name], "param.")
    assert back.keys() == official.keys()
    for key, tensor in official.items():
        assert torch.equal(back[key], tensor), key


def test_the_language_model_gives_the_golden_logits():
    model = stored("siamese-lm")
    ours = DecoderLM(decoder_config(model.settings)).double().eval()
    parameters = dict(ours.named_parameters())
    tensors = write_tensors_of("normstream", model)
    assert parameters.keys() == tensors.keys()
    with torch.no_grad():
        for key, tensor in tensors.items():
            parameters[key].copy_(tensor)
        (tokens,) = golden(CASES["siamese-lm"], "input.").values()
        error = (ours(tokens) - golden(CASES["siamese-lm"], "output.")["logits"]).abs().max()
    assert error < 1e-9


@pytest.mark.parametrize(
    ("name", "norm", "inside", "end"),
    [
        ("siamese-deit", "join.norm_x", "blocks.0.post_norm1", "pre_norm"),
        ("siamese-deit", "read.norm_y", "blocks.0.pre_norm1", "post_norm"),
        ("siamese-dit", "join.norm_x", "blocks.0.postnorm1", "postnorm"),
        ("siamese-dit", "read.norm_y", "blocks.0.prenorm1", "prenorm"),
    ],
)
def test_the_last_norms_of_deit_are_swapped_and_those_of_dit_are_not(name, norm, inside, end):
    ours, official = write_tensors_of("normstream", stored(name)), golden(CASES[name], "param.")
    assert torch.equal(ours[f"before_layers.{norm}.weight"], official[f"{inside}.weight"])
    assert torch.equal(ours[f"layers.2.after_feed_forward.{norm}.weight"], official[f"{end}.weight"])


def test_the_gate_is_the_second_half_of_ff_proj():
    ours, official = write_tensors_of("normstream", stored("siamese-lm")), golden(CASES["siamese-lm"], "param.")
    up, gate = official["transformer.blocks.1.ff_proj.weight"].chunk(2)
    assert torch.equal(ours["layers.1.feed_forward.w_up.weight"], up)
    assert torch.equal(ours["layers.1.feed_forward.w_gate.weight"], gate)


def test_a_folder_becomes_a_run_that_gives_the_golden_logits_and_goes_back(tmp_path):
    """The folder says nothing of its format; the names do."""
    official = golden(CASES["siamese-lm"], "param.")
    source = tmp_path / "official"
    source.mkdir()
    write_tensors(source, official)
    write_json(source / "config.json", config_of(CASES["siamese-lm"]))
    result = convert_checkpoint(source, tmp_path / "run", "normstream")
    assert (result.source_format, result.family) == ("siamese-lm", "siamese_lm")
    model = load_model(tmp_path / "run").double()
    (tokens,) = golden(CASES["siamese-lm"], "input.").values()
    with torch.no_grad():  # load_model makes float32 parameters
        error = (model(tokens) - golden(CASES["siamese-lm"], "output.")["logits"]).abs().max()
    assert error < 1e-5
    convert_checkpoint(tmp_path / "run", tmp_path / "back", "siamese-lm")
    back = read_tensors(tmp_path / "back")
    assert back.keys() == official.keys()
    assert all(torch.equal(back[key], official[key]) for key in official)


@pytest.mark.parametrize("missing", ["transformer.blocks.0.c1", "transformer.ln_y_f.weight"])
def test_a_missing_norm_is_named(missing):
    one = family_of("siamese_lm")
    tensors = golden(CASES["siamese-lm"], "param.")
    del tensors[missing]
    with pytest.raises(ValueError, match=r"(layer 0 attention_x_scale|final_y_norm) .* is missing"):
        read_tensors_of("siamese-lm", one, one.settings(config_of(CASES["siamese-lm"])), tensors)


def test_a_configuration_of_another_wiring_is_refused():
    with pytest.raises(ValueError, match="attn_norm is True"):
        family_of("siamese_lm").settings({**config_of(CASES["siamese-lm"]), "attn_norm": True})
