"""The statements of the papers, each against its own number, with tolerances for the finite width and few draws."""

from statistics import fmean

import pytest

from normstream.lab.theory import checks
from normstream.lab.theory.config import TheoryConfig
from normstream.lab.theory.measure import measure
from normstream.lab.theory.siamese import stream_cosines
from normstream.lab.theory.theorem import last_gradient
from normstream.lab.theory.update import first_updates

CONFIG = TheoryConfig(dim=128)


def test_lemma_1() -> None:
    assert checks.lemma_1().measured == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("ratio", "added"), [(1, 0.5), (2, 4 / 9), (4, 0.32)])
def test_the_feed_forward_adds_delta(ratio: float, added: float) -> None:
    assert checks.growth(ratio, CONFIG).measured == pytest.approx(added, rel=0.05)


def test_lemma_2_post_norm() -> None:
    squares = measure("post", 12, CONFIG)["norm_input"]
    measured = [square for name, square in squares.items() if name.endswith("after_feed_forward.join.norm")]
    assert len(measured) == 12
    assert fmean(measured) == pytest.approx(1.5, rel=0.06)


def test_lemma_2_pre_norm() -> None:
    for layer, square in enumerate(measure("pre", 12, CONFIG)["square"]["x"][::2]):
        assert 0.95 * (1 + layer / 2) <= square <= 1.05 * (1 + 3 * layer / 2)


def test_one_token_meets_the_upper_bound() -> None:
    check = checks.lemma_2_one_token(TheoryConfig(dim=128, depths=(12,)))
    assert check.measured == pytest.approx(1 + 1.5 * 12, rel=0.06)


@pytest.mark.parametrize(("depth", "at_width_512"), [(6, 0.490), (12, 0.340), (24, 0.225), (48, 0.154)])
def test_theorem_1(depth: int, at_width_512: float) -> None:
    pre, post = last_gradient("pre", depth, CONFIG), last_gradient("post", depth, CONFIG)
    ratio = pre.gradient / post.gradient
    assert ratio == pytest.approx((1.5 / pre.square) ** 0.5, rel=0.03)
    assert ratio == pytest.approx(at_width_512, rel=0.06)
    assert post.square == pytest.approx(1.5, rel=0.03)


def test_deepnorm_keeps_the_first_step_of_sgd_independent_of_depth() -> None:
    config = TheoryConfig(dim=64, tokens=8, seeds=(0, 1, 2, 3))
    low, high = (first_updates("deepnorm", depth, config) for depth in (6, 24))
    assert high["sgd"] / low["sgd"] == pytest.approx(1, abs=0.15)
    assert high["adam"] / low["adam"] == pytest.approx(2, rel=0.15)
    post = [first_updates("post", depth, config)["sgd"] for depth in (6, 24)]
    assert post[1] / post[0] > 2


@pytest.mark.parametrize(
    ("constant", "cosine", "tolerance"),
    [("sublayer", 0.9999, 1e-4), ("code", 0.998, 1e-3), ("paper", 0.950, 5e-3), ("none", 0.44, 0.04)],
)
def test_siamese_streams(constant: str, cosine: float, tolerance: float) -> None:
    """Updates drawn at random are orthogonal within about 1/64 only: 0.44 was one draw, their mean is 0.42."""
    measured = [stream_cosines(constant, seed)["cosine"][-1] for seed in range(4)]
    assert fmean(measured) == pytest.approx(cosine, abs=tolerance)


@pytest.mark.parametrize("constant", ["sublayer", "code", "paper", "none"])
def test_siamese_streams_with_orthogonal_updates(constant: str) -> None:
    found = stream_cosines(constant, 0, dim=128, n_layers=8, orthogonal=True)
    assert found["cosine"] == pytest.approx(found["predicted"], abs=1e-12)


def test_a_check_says_whether_it_holds() -> None:
    def holds(predicted, measured, **options) -> bool:
        return checks.Check("", "", predicted, measured, tolerance=0.1, **options).holds

    assert holds(2.0, 2.19)
    assert not holds(2.0, 2.21)
    assert holds(0.0, 0.09)
    assert not holds(0.0, 0.11)
    assert holds((1.0, 2.0), 2.1, relation="between")
    assert not holds((1.0, 2.0), 2.3, relation="between")
    assert not holds((1.0, 2.0), 1.5, relation="between", everywhere=False)
    assert holds(3.0, 30.0, relation="at least")
    assert not holds(3.0, 2.0, relation="at least")
