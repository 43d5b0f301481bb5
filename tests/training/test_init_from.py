from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from normstream import DecoderConfig, DecoderLM, initialize
from normstream.training import init_from

TOKENS = torch.arange(10).view(2, 5)


def model(placement: str, seed: int = 0, **options: int | bool) -> DecoderLM:
    config = {"vocab_size": 11, "dim": 8, "n_layers": 2, "n_heads": 2} | options
    made = DecoderLM(DecoderConfig(placement=placement, **config))  # pyright: ignore[reportArgumentType]
    initialize(made, seed)
    return made


def saved(made: DecoderLM, folder: Path) -> Path:
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.ndim == 1:
                p.copy_(torch.linspace(0.5, 1.5, p.numel()) + len(name) % 7)
    save_file(dict(made.named_parameters()), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def test_same_placement_is_the_same_model(tmp_path: Path):
    source, target = model("siamese"), model("siamese", seed=1)
    report = init_from(target, saved(source, tmp_path))
    assert torch.equal(target(TOKENS), source(TOKENS))
    assert (report.new, report.dropped) == ([], [])


def test_pre_norm_to_siamese(tmp_path: Path):
    source, target = model("pre"), model("siamese", seed=1)
    report = init_from(target, saved(source, tmp_path))
    weights, old = dict(target.named_parameters()), dict(source.named_parameters())
    for layer in ("layers.0.attention.wq", "layers.1.feed_forward.w_down", "tok_embeddings"):
        assert torch.equal(weights[f"{layer}.weight"], old[f"{layer}.weight"])
    junctions = ["before_layers"]
    junctions += [f"layers.{i}.after_{kind}" for i in (0, 1) for kind in ("attention", "feed_forward")]
    for junction in junctions:
        assert torch.equal(weights[f"{junction}.read.norm_y.weight"], old[f"{junction}.read.norm.weight"])
    assert report.dropped == []
    assert sorted(report.new) == sorted(
        f"{junction}.{part}.weight" for junction in junctions for part in ("join.norm_x", "read.norm_in")
    )
    assert all(torch.equal(weights[name], torch.ones(8)) for name in report.new)


def test_pre_norm_to_siamese_with_silent_x_stream_is_pre_norm(tmp_path: Path):
    """The copied y stream is the Pre-Norm stream: without the x stream and the input norm, the function is the same."""
    source = model("pre")
    target = model("siamese(input_norm=false,read_out=paper)", seed=1)
    report = init_from(target, saved(source, tmp_path))
    with torch.no_grad():
        for name, p in target.named_parameters():
            if name in report.new:
                p.zero_()
    torch.testing.assert_close(target(TOKENS), source(TOKENS))


def test_post_norm_to_siamese_takes_the_x_gains(tmp_path: Path):
    source, target = model("post"), model("siamese", seed=1)
    report = init_from(target, saved(source, tmp_path))
    assert report.copied["layers.0.after_attention.join.norm_x.weight"] == "layers.0.after_attention.join.norm.weight"
    assert report.dropped == []


def test_siamese_to_pre_drops_gains_and_says_so(tmp_path: Path):
    report = init_from(model("pre"), saved(model("siamese"), tmp_path))
    assert len(report.dropped) == 15
    assert all("norm_" in name for name in report.dropped)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 12}, r"tok_embeddings.weight is \(11, 8\) there and \(12, 8\) here"),
        ({"n_layers": 3}, "layers.2.attention.wq.weight is only here"),
        ({"n_layers": 1}, "layers.1.attention.wq.weight is only there"),
        ({"tied": False}, "lm_head.weight is only here"),
    ],
)
def test_models_that_do_not_continue_one_another(options: dict[str, int], message: str, tmp_path: Path):
    target = model("pre", **({"tied": True} | options))
    before = {name: p.clone() for name, p in target.named_parameters()}
    with pytest.raises(ValueError, match=message):
        init_from(target, saved(model("pre", tied=True), tmp_path))
    assert all(torch.equal(before[name], p) for name, p in target.named_parameters())


def test_nothing_to_read(tmp_path: Path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        init_from(model("pre"), tmp_path)
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"cut\.safetensors"):
        init_from(model("pre"), tmp_path / "cut.safetensors")
