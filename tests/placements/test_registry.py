"""Names, option strings, errors and placements of the user's own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from normstream import placements
from normstream.init import initialize
from normstream.junctions import Drop, Join, Read, Start, State
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig
from normstream.placements import registry


def test_names_lists_every_placement():
    assert {"pre", "post", "siamese", "siamese_hybrid_pre"} <= set(placements.names())
    assert placements.names() == sorted(placements.names())


@pytest.mark.parametrize("name", placements.names())
def test_every_placement_says_what_it_is(name):
    placement = placements.get(name)
    assert placement.name == name
    assert str(placement) == name
    for text in (placement.title, placement.equation, placement.paper, placement.code):
        assert isinstance(text, str)
        assert text
    assert placement.streams[0] in ("x", "h")
    assert placements.get(f"{name}()") == placement


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("siames", ["siames", "'siamese'"]),
        ("pree", ["pree", "'pre'"]),
        ("siamese(depth_scal=paper)", ["depth_scal", "'depth_scale'"]),
        ("siamese(depth_scale=papr)", ["papr", "'paper'"]),
        ("siamese(input_norm=flase)", ["flase", "'false'"]),
        ("siamese(read_out=cod)", ["cod", "'code'"]),
        ("pre(depth_scale=paper)", ["depth_scale"]),
        ("siamese(depth_scale)", ["depth_scale"]),
        ("siamese(depth_scale=paper", ["siamese(depth_scale=paper"]),
        ("siamese)", ["siamese)"]),
        ("PRE", ["PRE", "'pre'"]),
        ("pre:-1", ["pre:-1", "FIRST-LAST"]),
        ("pre:5-2", ["pre:5-2", "block 0"]),
        ("mhc(n_streams=1.5)", ["1.5", "a whole number"]),
        ("", [""]),
    ],
)
def test_mistakes_are_named_with_the_nearest_valid_word(spec, words):
    with pytest.raises(ValueError, match=r".+") as error:
        placements.get(spec)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_model_reports_a_wrong_placement():
    with pytest.raises(ValueError, match="siamese"):
        DecoderLM(DecoderConfig(placement="siames"))


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("siamese", ("code", "code", True, True)),
        ("siamese(depth_scale=paper,input_norm=false)", ("paper", "code", True, False)),
        ("siamese( read_out = paper , embedding_norm=false )", ("code", "paper", False, True)),
        ("siamese()", ("code", "code", True, True)),
    ],
)
def test_option_strings(spec, options):
    placement: Any = placements.get(spec)
    got = (placement.depth_scale, placement.read_out, placement.embedding_norm, placement.input_norm)
    assert got == options
    assert placements.get(str(placement)) == placement


class OwnJoin(Join):
    def __init__(self, drop: Drop, scale: float) -> None:
        super().__init__(drop)
        self.scale = scale

    def contributions(self, update: Tensor) -> State:
        return (self.scale * self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        return (state[0] + self.contributions(update)[0],)


class OwnRead(Read):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: State) -> tuple[State, Tensor]:
        return state, self.norm(state[0])


@dataclass(frozen=True)
class OwnPreNorm(placements.Placement):
    """Pre-Norm again, with a scale that at 1 changes nothing."""

    name: ClassVar[str] = "test_own_pre_norm"
    title: ClassVar[str] = "A test's Pre-Norm"
    streams: ClassVar[tuple[str, ...]] = ("x",)
    equation: ClassVar[str] = "x <- x + scale * o;  z = N(x)"
    paper: ClassVar[str] = "none"
    code: ClassVar[str] = "none"

    scale: float = 1.0

    def first(self, build: placements.Build) -> nn.Module:
        return Start()

    def join(self, slot: placements.Slot, build: placements.Build) -> Join:
        return OwnJoin(build.drop(slot), self.scale)

    def read(self, slot: placements.Slot, build: placements.Build) -> Read:
        return OwnRead(build.norm())

    def last_read(self, build: placements.Build) -> Read:
        return OwnRead(build.norm())


@pytest.fixture
def own_registry(monkeypatch):
    """Names given in a test are forgotten after it."""
    monkeypatch.setattr(registry, "_PLACEMENTS", dict(registry._PLACEMENTS))


def logits(placement: str) -> Tensor:
    config = DecoderConfig(
        placement=placement, vocab_size=11, dim=16, n_layers=2, n_heads=2, max_seq_len=8, norm=NormConfig(), init="gpt2"
    )
    model = DecoderLM(config)
    initialize(model, seed=0)
    return model(torch.arange(8)[None])


def test_a_placement_of_the_users_own_works_in_the_model(own_registry):
    assert placements.register(OwnPreNorm) is OwnPreNorm
    assert "test_own_pre_norm" in placements.names()
    assert placements.get("test_own_pre_norm(scale=2.5)") == OwnPreNorm(scale=2.5)
    assert_close(logits("test_own_pre_norm"), logits("pre"), rtol=0, atol=1e-6)
    assert (logits("test_own_pre_norm(scale=2.5)") - logits("pre")).abs().max() > 0.01
    with pytest.raises(ValueError, match="scale"):
        placements.get("test_own_pre_norm(scale=big)")


def test_a_name_is_given_once(own_registry):
    with pytest.raises(ValueError, match="siamese"):

        @placements.register
        @dataclass(frozen=True)
        class Impostor(OwnPreNorm):
            name: ClassVar[str] = "siamese"

    assert type(placements.get("siamese")) is placements.SiameseNorm


PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from normstream import placements

@dataclass(frozen=True)
class Plugged(placements.PreNorm):
    name: ClassVar[str] = "plugged"
"""


def test_another_package_adds_a_placement_by_entry_point(tmp_path):
    (tmp_path / "plugged_package.py").write_text(PLUGIN)
    info = tmp_path / "plugged_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[normstream.placements]\nplugged = plugged_package:Plugged\n")
    code = "from normstream import placements; print(placements.names()); print(placements.get('plugged').name)"
    path = os.pathsep.join([str(tmp_path), *[p for p in sys.path if p]])
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    listed, got = run.stdout.splitlines()
    assert "'plugged'" in listed
    assert "'siamese'" in listed
    assert got == "plugged"
