"""Every configuration refuses values of the wrong type, and takes numpy's numbers for Python's."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normstream.checkpoints.surgery.denorm import DenormConfig
from normstream.lab import CompareConfig
from normstream.lab.theory import TheoryConfig
from normstream.layers import LatentConfig, PositionConfig
from normstream.layers.inner import Inner
from normstream.models import MODELS, DecoderConfig
from normstream.norms import NormConfig
from normstream.optim import OptimizerConfig, ScheduleConfig
from normstream.optim.config import QKClipConfig
from normstream.tasks import TASKS
from normstream.training import TrainConfig, config_from_yaml, config_to_yaml

CONFIGS = (
    *(NormConfig, Inner, PositionConfig, LatentConfig, OptimizerConfig, QKClipConfig, ScheduleConfig),
    *(TrainConfig, CompareConfig, TheoryConfig, DenormConfig),
    *dict.fromkeys([*MODELS, *(task.data_config for task in TASKS.values())]),
)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (DecoderConfig, {"n_layers": 3.5}, r"n_layers must be of type int, got 3\.5 \(float\)"),
        (DecoderConfig, {"dim": 64.0}, r"dim must be of type int, got 64\.0 \(float\)"),
        (DecoderConfig, {"placement": None}, r"placement must be of type str, got None \(NoneType\)"),
        (DecoderConfig, {"norm": {"kind": "rms"}}, r"norm must be of type NormConfig, got {'kind': 'rms'} \(dict\)"),
        (DecoderConfig, {"tied": 1}, r"tied must be of type bool, got 1 \(int\)"),
        (OptimizerConfig, {"lr": "1e-3"}, r"optimizer\.lr must be of type float, got '1e-3' \(str\)"),
        (OptimizerConfig, {"betas": 0.9}, r"optimizer\.betas must be of type tuple of 2 floats, got 0\.9 \(float\)"),
        (OptimizerConfig, {"betas": (0.9,)}, r"optimizer\.betas must be of type tuple of 2 floats"),
        (OptimizerConfig, {"momentum": "0.9"}, r"optimizer\.momentum must be of type float or None"),
        (ScheduleConfig, {"warmup": 0.5}, r"schedule\.warmup must be of type int, got 0\.5"),
        (TrainConfig, {"seed": True}, r"seed must be of type int, got True \(bool\)"),
        (TrainConfig, {"optimizer": "sgd"}, r"optimizer must be of type OptimizerConfig, got 'sgd'"),
        (TrainConfig, {"clip": True}, r"clip must be of type float or None, got True"),
        (CompareConfig, {"lrs": 0.1}, r"lrs must be of type tuple of float, got 0\.1"),
        (CompareConfig, {"lrs": ("0.1",)}, r"lrs must be of type tuple of float"),
        (CompareConfig, {"placements": "pre"}, r"placements must be of type tuple of str, got 'pre'"),
        (CompareConfig, {"seeds": (0.0,)}, r"seeds must be of type tuple of int"),
        (CompareConfig, {"out": "runs/compare"}, r"out must be of type Path, got 'runs/compare'"),
    ],
)
def test_wrong_types(kind: type[Any], wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        kind(**wrong)


@pytest.mark.untyped
@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_field_of_every_configuration_is_checked(kind: type[Any]):
    """No field takes an object that is of no type at all: a bare object is none that a hint could mean."""
    for field in fields(kind):
        with pytest.raises(ValueError, match=rf"{field.name}"):
            kind(**{field.name: object()})


def test_whole_numbers_stand_for_floats():
    assert OptimizerConfig(lr=1).lr == 1


@pytest.mark.untyped
def test_numbers_of_numpy_become_those_of_python():
    """Else a config that was made from np.arange or np.logspace could not be written into the run's folder."""
    numbers: dict[str, Any] = {"seed": np.int64(3), "steps": np.int32(7)}
    layers: dict[str, Any] = {"n_layers": np.float64(2)}
    made = TrainConfig(**numbers, optimizer=OptimizerConfig(lr=np.float64(0.5)))
    assert [type(value) for value in (made.seed, made.steps, made.optimizer.lr)] == [int, int, float]
    assert (
        config_from_yaml(config_to_yaml(made), TrainConfig)
        == made
        == TrainConfig(seed=3, steps=7, optimizer=OptimizerConfig(lr=0.5))
    )
    lists: dict[str, Any] = {"lrs": tuple(np.logspace(-3, -2, 2)), "seeds": tuple(np.arange(2))}
    plan = CompareConfig(**lists, out=Path("runs"))
    assert config_from_yaml(config_to_yaml(plan), CompareConfig) == plan
    with pytest.raises(ValueError, match=r"n_layers must be of type int, got 2\.0"):
        DecoderConfig(**layers)


def test_flags_of_numpy():
    assert DecoderConfig(tied=bool(np.bool_(True))).tied is True
