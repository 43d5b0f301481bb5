import re

import pytest

from normstream.lab.plan import CompareConfig, Run
from normstream.training import TrainConfig


def test_every_combination_seed_by_seed():
    runs = CompareConfig(placements=("pre", "post"), lrs=(1e-3, 1e-2), seeds=(0, 7)).runs()
    assert [(run.seed, run.lr, run.placement) for run in runs] == [
        (0, 1e-3, "pre"), (0, 1e-3, "post"), (0, 1e-2, "pre"), (0, 1e-2, "post"),
        (7, 1e-3, "pre"), (7, 1e-3, "post"), (7, 1e-2, "pre"), (7, 1e-2, "post"),
    ]  # fmt: skip
    assert len({run.folder for run in runs}) == 8


def test_a_run_changes_nothing_but_three_fields():
    base = TrainConfig(steps=7)
    config = Run("post", 0.5, 3).config(base)
    assert (config.model.placement, config.optimizer.lr, config.seed) == ("post", 0.5, 3)
    assert Run(base.model.placement, base.optimizer.lr, base.seed).config(config) == base


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placements": ("pre", "siamse")}, "unknown placement 'siamse'; did you mean 'siamese'"),
        ({"placements": ("siamese(depht_scale=paper)",)}, "did you mean 'depth_scale'"),
        ({"placements": ("siamese", "siamese(depth_scale=code)")}, "placement siamese is given 2 times"),
        ({"placements": ()}, "placements is empty"),
        ({"lrs": (0.0,)}, "between 1e-30 and 1e+30, got 0.0"),
        ({"lrs": (1e-2, -1e-3)}, "between 1e-30 and 1e+30, got -0.001"),
        ({"lrs": (float("nan"),)}, "between 1e-30 and 1e+30, got nan"),
        ({"lrs": (1e-300, 1e300)}, "between 1e-30 and 1e+30, got 1e-300"),
        ({"lrs": (1e-2, 0.01)}, "learning rate 0.01 is given 2 times"),
        ({"seeds": (1, 1)}, "seed 1 is given 2 times"),
        ({"seeds": (-1,)}, "seeds must not be negative, got -1"),
        ({"budget": "soon"}, "such as 90s, 5m or 1h30m, got 'soon'"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CompareConfig(**change)
