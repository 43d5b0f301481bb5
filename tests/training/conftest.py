"""A small text, a small model and runs that take a fraction of a second."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normstream.data import Data, DataConfig, load_data
from normstream.models import DecoderConfig
from normstream.optim import OptimizerConfig, ScheduleConfig
from normstream.training import TrainConfig

WORDS = ("the", "norm", "of", "a", "residual", "stream", "is", "read", "by", "every", "layer", "and", "joined", "again")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty short files of made-up sentences."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(" ".join(rng.choices(WORDS, k=80)) + ".\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data(text_folder: Path) -> Data:
    """The text as bytes, in samples of 16."""
    return load_data(DataConfig(source=str(text_folder), seq_len=16, validation_fraction=0.2))


@pytest.fixture
def config(text_folder: Path) -> Callable[..., TrainConfig]:
    """Makes a config of 12 quick steps; keywords go to the part of the config that has them."""

    def make(**options: Any) -> TrainConfig:
        base = TrainConfig(
            model=DecoderConfig(placement="siamese", dim=32, n_layers=2, n_heads=2, ffn_dim=32, max_seq_len=16),
            data=DataConfig(source=str(text_folder), seq_len=16, validation_fraction=0.2),
            optimizer=OptimizerConfig(lr=1e-2),
            schedule=ScheduleConfig(),
            steps=12,
            batch_size=4,
            eval_every=4,
            eval_batches=2,
            stats_every=3,
            checkpoint_every=5,
            device="cpu",
        )
        parts = {"model": base.model, "data": base.data, "optimizer": base.optimizer, "schedule": base.schedule}
        for name, part in parts.items():
            own = {key: options.pop(key) for key in list(options) if hasattr(part, key) and not hasattr(base, key)}
            parts[name] = replace(part, **own)
        return replace(base, **(parts | options))

    return make
