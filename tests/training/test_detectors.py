import math

import numpy as np
import pytest

from normstream.training.divergence import DivergenceDetector, collapsed, nonfinite_cause, unigram_loss
from normstream.training.spikes import SpikeCounter, spike_score


def test_one_spike_among_normal_values():
    values = np.random.default_rng(0).standard_normal(2000)
    values[1500] = 20.0
    assert spike_score(values.tolist()) == 1 / 2000


def test_spike_is_not_in_its_own_window_but_in_the_next():
    counter = SpikeCounter([2.0, 2.1] * 25)
    # With the 9 in the window, the limit is 2.19 + 7 * 0.96 = 8.9.
    assert [counter.update(value) for value in (9.0, 8.5, 2.0)] == [True, False, False]


def test_falling_loss_and_short_history_have_no_spikes():
    assert spike_score([10 / n for n in range(1, 200)]) == 0
    assert not SpikeCounter().update(11.0)
    assert not SpikeCounter([2.0, 2.1] * 24).update(1e9)


def test_nonfinite_values_are_not_counted_as_spikes():
    counter = SpikeCounter([2.0, 2.1] * 25)
    assert not counter.update(math.inf)
    assert len(counter.values) == 50


def verdict(losses: list[float]) -> tuple[int | None, str | None]:
    detector = DivergenceDetector(uniform=math.log(257))
    for step, loss in enumerate(losses, start=1):
        detector.update(step, loss)
    return detector.above_since, detector.cause()


def test_run_that_ends_above_a_guess():
    step, cause = verdict([5.6] * 10 + [3.0] * 50 + [9.0] * 40)
    # mean of 20 above 5.6 from the 9th high loss on: (11 * 3 + 9 * 9) / 20 = 5.7
    assert step == 69
    assert cause is not None
    assert "is 9, above 5.6, since step 69" in cause


def test_run_that_recovers_has_not_diverged():
    assert verdict([5.6] + [9.0] * 40 + [3.0] * 30) == (None, None)


def test_start_from_good_weights_is_measured_against_a_guess():
    assert verdict([2.0] + [2.1] * 50) == (None, None)
    assert verdict([2.0] + [5.6] * 50)[0] == 21


def test_short_run_is_not_judged():
    assert verdict([5.6] + [9.0] * 18) == (None, None)


@pytest.mark.parametrize(
    ("loss", "norm", "cause"),
    [
        (math.nan, 1.0, "training loss is nan"),
        (math.inf, math.nan, "training loss is inf"),
        (2.0, math.inf, "gradient norm is inf"),
        (2.0, 1.0, None),
    ],
)
def test_cause(loss: float, norm: float, cause: str | None):
    assert nonfinite_cause(loss, norm) == cause


def test_collapse_is_the_unigram_loss():
    counts = np.array([89, 9, 0])
    baseline = unigram_loss(counts, np.array([0, 0, 1]))
    assert baseline == pytest.approx(-(2 * math.log(90 / 101) + math.log(10 / 101)) / 3)
    assert collapsed(3.17, 3.2, steps=300)
    assert not collapsed(3.14, 3.2, steps=300)
    assert not collapsed(5.0, 3.2, steps=99)
    assert not collapsed(None, 3.2, steps=300)
