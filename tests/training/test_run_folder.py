import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normstream.data import Data
from normstream.training import RunFolder, RunResult, TrainConfig, train

Make = Callable[..., TrainConfig]
RESULT = RunResult(
    steps=3,
    train_loss=2.0,
    val_loss=2.5,
    best_val_loss=2.5,
    diverged=False,
    diverged_step=None,
    cause=None,
    collapsed=False,
    baseline_loss=3.0,
    metrics={},
    spikes=0,
    skipped=0,
    tokens_per_second=10.0,
    seconds=1.5,
    parameters=7,
    non_embedding_parameters=5,
)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", [(), (".lock",), (".lock", ".config.yaml.tmp")])
def test_folder_in_which_nothing_has_begun(
    left: tuple[str, ...], resume: bool, config: Make, data: Data, tmp_path: Path
):
    for name in left:
        (tmp_path / name).write_text("123")
    assert train(config(steps=1), tmp_path, data=data, resume=resume).steps == 1


def test_result_of_another_version(tmp_path: Path):
    run = RunFolder(tmp_path)
    run.write_result(RESULT)
    values = json.loads(run.result.read_text())
    run.result.write_text(json.dumps(values | {"of_a_later_version": 1}))
    assert run.read_result() == RESULT
    del values["spikes"]
    run.result.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"result\.json is incomplete: spikes missing"):
        run.read_result()


def test_result_without_numbers_that_are_not_finite(tmp_path: Path):
    run = RunFolder(tmp_path)
    run.write_result(replace(RESULT, train_loss=math.inf, baseline_loss=math.nan))
    values = json.loads(run.result.read_text())
    assert (values["train_loss"], values["baseline_loss"]) == (None, None)
