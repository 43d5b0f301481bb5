import math

import pytest

from normstream.optim import ScheduleConfig, learning_rate


def rates(config: ScheduleConfig, peak: float, steps: int) -> list[float]:
    return [learning_rate(config, peak, step, steps) for step in range(1, steps + 1)]


def test_cosine_reference_value():
    config = ScheduleConfig("cosine", warmup=10, final_fraction=0.0)
    assert learning_rate(config, 1e-3, 50, 100) == pytest.approx(5.868241e-4, rel=1e-7)
    assert learning_rate(config, 1e-3, 10, 100) == 1e-3
    assert learning_rate(config, 1e-3, 100, 100) == pytest.approx(0.0, abs=1e-18)
    assert learning_rate(config, 1e-3, 1, 100) == pytest.approx(1e-4)


def test_noam_is_the_transformer_schedule():
    d, w = 512, 4000
    config, peak = ScheduleConfig("noam", warmup=w), (d * w) ** -0.5
    assert peak == pytest.approx(6.988e-4, rel=1e-4)
    assert learning_rate(config, peak, 1, 10**6) == pytest.approx(1.747e-7, rel=1e-3)
    assert learning_rate(config, peak, 100_000, 10**6) == pytest.approx(1.398e-4, rel=1e-3)
    for t in (1, 100, 3999, 4000, 4001, 70_000):
        assert learning_rate(config, peak, t, 10**6) == pytest.approx(d**-0.5 * min(t**-0.5, t * w**-1.5))


def test_noam_without_warmup_starts_at_the_peak():
    assert rates(ScheduleConfig("noam"), 1.0, 4) == pytest.approx([1.0, 2**-0.5, 3**-0.5, 0.5])


def test_linear():
    config = ScheduleConfig("linear", warmup=2, final_fraction=0.5)
    assert rates(config, 1.0, 6) == pytest.approx([0.5, 1.0, 0.875, 0.75, 0.625, 0.5])


def test_wsd():
    config = ScheduleConfig("wsd", warmup=2, final_fraction=0.0, decay_fraction=0.4)
    assert rates(config, 1.0, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


def test_constant_and_no_warmup():
    assert rates(ScheduleConfig("constant"), 0.3, 3) == [0.3, 0.3, 0.3]


def test_no_warmup_cosine_is_below_the_peak_by_one_step():
    config = ScheduleConfig("cosine", warmup=0, final_fraction=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2 for n in range(1, 5)]
    assert rates(config, 1.0, 4) == pytest.approx(expected)


def test_warmup_as_long_as_the_run():
    for kind in ("constant", "linear", "cosine", "wsd", "noam"):
        assert rates(ScheduleConfig(kind, warmup=4), 1.0, 4) == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    "wrong", [{"warmup": -1}, {"final_fraction": 1.5}, {"decay_fraction": 0.0}, {"final_fraction": float("nan")}]
)
def test_impossible_options(wrong: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ScheduleConfig(**wrong)  # pyright: ignore[reportArgumentType]


def test_step_zero():
    with pytest.raises(ValueError, match="counted from 1"):
        learning_rate(ScheduleConfig(), 1.0, 0, 10)
