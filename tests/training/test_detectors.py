import math

import numpy as np
import pytest

from normstream.tasks.baseline import unigram_loss
from normstream.training.divergence import DivergenceDetector, collapsed, nonfinite_cause
from normstream.training.spikes import OLMO_CORE, SpikeCounter, SpikeRule, spike_score, stability_score


@pytest.mark.parametrize("position", [60, 500, 999, 1000, 1500, 1999])
@pytest.mark.parametrize("value", [20.0, -20.0])
def test_one_spike_among_normal_values(position: int, value: float):
    values = np.random.default_rng(0).standard_normal(2000)
    values[position] = value
    assert spike_score(values) == 1 / 2000
    assert spike_score(values, sided=1) == (value > 0) / 2000
    assert stability_score(values) == (value > 0 and position >= 128) / 2000


def test_olmo2_counts_at_least_seven_deviations_of_the_last_thousand():
    # Mean 0 and deviation 1 exactly; before them lie values that must have left the window.
    window = [100.0] * 7 + [1.0, -1.0] * 500
    for value, spikes in ((7.0, 1), (-7.0, 1), (6.999, 0), (-6.999, 0)):
        assert spike_score([*window, value]) * 1008 == pytest.approx(spikes)
    assert spike_score([*window, 5.0, 5.0], window=10, k=4, sided=1) * 1009 == pytest.approx(1)


def test_olmo_core_counts_more_than_six_deviations_of_a_full_window():
    full, quiet = [1.0, -1.0] * 64, [0.0] * 200
    for before, value, spikes in (
        (full, 6.001, 1),
        (full, 6.0, 0),
        (full, -50.0, 0),
        (full[1:], 50.0, 0),
        (quiet, 1, 0),
    ):
        assert stability_score([*before, value]) * (len(before) + 1) == pytest.approx(spikes)
    # A step counts once. The second 7 meets a window with a 7 in it, whose limit is 0.05 + 6 * 1.17.
    loss, norm = [*full, 7.0, 0.0, 7.0, 0.0], [*full, 7.0, 7.0, 0.0, 0.0]
    assert stability_score(loss) * 132 == pytest.approx(1)
    assert stability_score(loss, norm) * 132 == pytest.approx(1)
    assert stability_score(loss, [*full, 0.0, 7.0, 0.0, 0.0]) * 132 == pytest.approx(2)


def test_olmo_core_rate_is_over_the_last_ten_thousand_steps():
    values = [1.0, -1.0] * 64 + [9.0] + [1.0, -1.0] * 5000
    assert stability_score(values[:129]) == 1 / 129
    assert stability_score(values[:10_128]) == 1 / 10_000
    assert stability_score(values) == 0


def test_gradient_norms_of_other_length():
    with pytest.raises(ValueError, match="as many gradient norms as losses, got 1 for 2"):
        stability_score([1.0, 2.0], [1.0])


@pytest.mark.untyped
@pytest.mark.parametrize("wrong", [{"window": 0}, {"k": 0.0}, {"sided": 3}])
def test_impossible_rules(wrong: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SpikeRule(**wrong)  # pyright: ignore[reportArgumentType]


def test_counter_goes_on_from_what_a_checkpoint_keeps():
    values = np.random.default_rng(1).standard_normal(300).tolist()
    values[200] = 12.0
    whole = SpikeCounter(rule=OLMO_CORE)
    seen = [whole.update(value) for value in values]
    first = SpikeCounter(rule=OLMO_CORE)
    for value in values[:150]:
        first.update(value)
    second = SpikeCounter(list(first.values), first.count, OLMO_CORE)
    assert [second.update(value) for value in values[150:]] == seen[150:]
    assert second.count == whole.count == 1


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
