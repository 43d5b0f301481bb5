from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from normstream.lab import CompareConfig
from normstream.norms import NormConfig
from normstream.training import TrainConfig, config_from_yaml, config_to_yaml


@dataclass(frozen=True)
class Example:
    name: str = "a"
    rate: float = 0.1
    count: int = 1
    active: bool = False
    kind: Literal["x", "y"] = "x"
    limit: int | None = None
    folder: Path | None = None
    rates: tuple[float, ...] = (0.1, 1e-5)
    pair: tuple[int, str] = (1, "b")
    norm: NormConfig = field(default_factory=NormConfig)


def read(text: str) -> Example:
    return config_from_yaml(text, Example)


def test_train_config_comes_back(config: Callable[..., TrainConfig]):
    made = config(lr=1 / 3, eps=1e-12, init_from=Path("runs/a"), clip=None)
    assert config_from_yaml(config_to_yaml(made), TrainConfig) == made


def test_every_kind_of_field_comes_back():
    made = Example("b", 1e-7, 2, True, "y", 3, Path("a/b"), (1.0, 2.5), (2, "c"), NormConfig(kind="layer", bias=True))
    assert read(config_to_yaml(made)) == made


def test_missing_keys_have_their_defaults():
    assert read("") == Example()
    assert read("rate: 2") == Example(rate=2.0)
    assert read("norm: {eps: 1e-6}") == Example(norm=NormConfig(eps=1e-6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("naem: b", r"unknown key 'naem'; did you mean 'name'\?"),
        ("norm: {epsilon: 1}", r"unknown key 'norm.epsilon'; did you mean 'eps'\?"),
        ("kind: z", "kind cannot be 'z'"),
        ("count: 1.5", "count must be of type int, got 1.5"),
        ("count: true", "count must be of type int, got True"),
        ("active: 1", "active must be of type bool"),
        ("rate: fast", "rate must be of type float, got 'fast'"),
        ("rate: null", "rate must be of type float, got None"),
        ("name: 3", "name must be of type str, got 3"),
        ("rates: 0.1", "rates must be a list"),
        ("rates: [0.1, a]", r"rates\[1\] must be of type float"),
        ("pair: [1]", "pair must have 2 values"),
        ("norm: rms", "norm must be a mapping"),
        ("[1, 2]", "the config must be a mapping"),
        ("a: [", "not valid YAML"),
        ("norm: {kind: rms, bias: true}", "kind rms has no bias"),
    ],
)
def test_what_does_not_fit_is_an_error(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{model: {rope_theta: 1e4}}", r"model\.rope_theta'; it is (base\.)?model\.positions\.theta now"),
        (
            "{model: {qkv_norm: qk}}",
            r"model\.qkv_norm'; it is (base\.)?model\.inner\.qk and (base\.)?model\.inner\.v now",
        ),
        ("{model: {bias: false}}", "model.bias cannot be False; it is none instead of false"),
        ("{model: {bias: al}}", "did you mean 'all'"),
    ],
)
def test_keys_of_older_versions_say_what_replaced_them(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        config_from_yaml(text, TrainConfig)
    with pytest.raises(ValueError, match=message):
        config_from_yaml(f"{{base: {text}}}", CompareConfig)


@pytest.mark.parametrize(("old", "now"), [("true", "layer"), ("false", "none")])
def test_values_of_older_versions_that_mean_the_same(old: str, now: str):
    text = f"{{activation_checkpointing: {old}}}"
    assert config_from_yaml(text, TrainConfig).activation_checkpointing == now
    assert config_from_yaml(f"{{base: {text}}}", CompareConfig).base.activation_checkpointing == now
    with pytest.raises(ValueError, match="chunked_loss cannot be"):
        config_from_yaml(f"{{chunked_loss: {old}}}", TrainConfig)
