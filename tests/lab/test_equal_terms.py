"""The runs of a comparison see the same samples in the same order and start from the same sublayers."""

import html
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from rich.console import Console
from torch import Tensor

from normstream.data import Batch, DataConfig
from normstream.lab import CompareConfig, compare
from normstream.models import DecoderConfig
from normstream.training import TrainConfig
from normstream.training.step import Updater

comparison = sys.modules["normstream.lab.compare"]  # the name normstream.lab.compare is the function
Seen = dict[tuple[str, int, float], list[dict[str, Tensor]]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What each run (placement, seed, learning rate) had at each of its updates: its tokens and its weights before."""
    monkeypatch.setattr("normstream.lab.report.pictures", lambda summary: [])
    updates: Seen = {}
    start = Updater.start

    def record(self: Updater, step: int, batch: Batch, *rest):
        config = self.config
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        tokens = {"inputs": batch.inputs_BT, "targets": batch.targets_BT}
        updates.setdefault((config.model.placement, config.seed, config.optimizer.lr), []).append(weights | tokens)
        return start(self, step, batch, *rest)

    monkeypatch.setattr(Updater, "start", record)
    return updates


@pytest.fixture
def config(tmp_path: Path) -> CompareConfig:
    (tmp_path / "text.txt").write_text("".join(chr(97 + n * n % 23) for n in range(2000)))
    base = TrainConfig(
        model=DecoderConfig(dim=16, n_layers=2, n_heads=2, ffn_dim=16, tied=False),
        data=DataConfig(source=str(tmp_path / "text.txt"), seq_len=16),
        steps=3,
        batch_size=4,
        device="cpu",
    )
    return CompareConfig(lrs=(1e-3,), base=base, out=tmp_path / "out")


def start_of(config: CompareConfig) -> str:
    """Compare; return the sentence on how the models start."""
    return compare(config, console=Console(file=io.StringIO()))["start"]


def test_same_samples_and_same_start(config: CompareConfig, seen: Seen):
    start = start_of(replace(config, placements=("pre", "post", "siamese"), lrs=(1e-3, 1e-2), seeds=(0, 1)))
    assert start == "started from the same values wherever two models have the same parameter"
    assert len(seen) == 3 * 2 * 2
    for (_, seed, _), updates in seen.items():
        reference = seen["pre", seed, 1e-3]
        assert len(updates) == 3
        for ours, theirs in zip(updates, reference, strict=True):
            assert torch.equal(ours["inputs"], theirs["inputs"])
            assert torch.equal(ours["targets"], theirs["targets"])
        for name, values in updates[0].items():
            if ".join." in name or ".read." in name:
                assert torch.equal(values, torch.ones_like(values)), name
            else:
                assert torch.equal(values, reference[0][name]), name
        # Seven matrices in each layer, the embedding, the head and the two kinds of tokens: nothing is passed over.
        sublayers = [name for name in updates[0] if ".join." not in name and ".read." not in name]
        assert len(sublayers) == 2 * 7 + 2 + 2, sublayers

    for name in ("inputs", "tok_embeddings.weight", "layers.0.attention.wq.weight"):
        assert not torch.equal(seen["pre", 0, 1e-3][0][name], seen["pre", 1, 1e-3][0][name])
    # After an update with another learning rate, the weights do differ.
    name = "tok_embeddings.weight"
    assert not torch.equal(seen["pre", 0, 1e-3][1][name], seen["pre", 0, 1e-2][1][name])


@pytest.mark.parametrize("init", ["placement", "plain"])
def test_a_placement_with_a_scheme_of_its_own(config: CompareConfig, seen: Seen, init: Literal["placement", "plain"]):
    """Pre-Norm brings plain, SiameseNorm (hybrid-pre) megatron_full, which scales what writes to the stream."""
    model = replace(config.base.model, init=init)
    start = start_of(replace(config, placements=("pre", "siamese_hybrid_pre"), base=replace(config.base, model=model)))
    pre, hybrid = (seen[name, 0, 1e-3][0] for name in ("pre", "siamese_hybrid_pre"))
    shared = [name for name in pre if name in hybrid and ".join." not in name and ".read." not in name]
    equal = all(torch.equal(pre[name], hybrid[name]) for name in shared)
    if init == "plain":
        assert equal
        assert start == "started from the same values wherever two models have the same parameter"
    else:
        assert not equal
        assert "plain for Pre-Norm; megatron_full for SiameseNorm (hybrid-pre); set model.init" in start
    assert start in html.unescape((config.out / "report.html").read_text())


def test_a_start_from_given_weights_is_named(config: CompareConfig):
    base = replace(config.base, init_from=Path("runs/before"))
    assert comparison.start(["pre", "siamese_hybrid_pre"], base) == "started from the weights in runs/before"
