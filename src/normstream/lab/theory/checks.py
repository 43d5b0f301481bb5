"""Statements of the papers, each with what it predicts, what was measured and whether the two agree."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import torch

from normstream import placements
from normstream.junctions import DeepNormJoin
from normstream.lab.theory.config import TheoryConfig
from normstream.lab.theory.measure import Measured, simplified
from normstream.lab.theory.predictions import (
    ffn_growth,
    last_gradient_ratio,
    pre_norm_bounds,
    pre_norm_growth,
    update_bound,
)
from normstream.lab.theory.probe import hidden_squares, run
from normstream.lab.theory.theorem import last_gradient
from normstream.lab.theory.xiong import branch_gain, draw_linear, random_numbers
from normstream.layers import FeedForward

Relation = Literal["equal", "between", "at least"]
SLACK = 0.05
XIONG, DEEPNET, SIAMESE = "Xiong et al. 2020", "DeepNet, Wang et al. 2022", "SiameseNorm"


@dataclass(frozen=True)
class Check:
    """One line of the table of statements.

    >>> Check("Lemma 1", "d = 512", 0.5, 0.501, tolerance=0.01).holds
    True
    """

    statement: str
    """What is said, with its formula."""
    setting: str
    """Where it was tried."""
    predicted: float | tuple[float, float]
    """One number, or the lower and upper bound."""
    measured: float
    """The number to compare."""
    tolerance: float
    """Allowed deviation: a fraction of the prediction, or the deviation itself where the prediction is 0."""
    source: str = XIONG
    """Where the statement is from."""
    relation: Relation = "equal"
    """How the two are to compare."""
    everywhere: bool = True
    """Whether it also held wherever else it was tried (bounds at every block, of which the last is shown)."""

    @property
    def holds(self) -> bool:
        """Whether measurement and prediction agree."""
        if isinstance(self.predicted, tuple):
            low, high = self.predicted
            return self.everywhere and low * (1 - self.tolerance) <= self.measured <= high * (1 + self.tolerance)
        if self.relation == "at least":
            return self.measured >= self.predicted * (1 - self.tolerance)
        return abs(self.measured - self.predicted) <= self.tolerance * (abs(self.predicted) or 1)


def lemma_1() -> Check:
    """E||ReLU(X)||^2 = sigma^2 d / 2 for X ~ N(0, sigma^2 I), by 20,000 samples."""
    x = torch.randn(20_000, 512, generator=random_numbers("inputs", 0))
    measured = x.relu().square().sum(-1).double().mean().item() / 512
    return Check("Lemma 1: E||ReLU(X)||^2 / (sigma^2 d) = 1/2", "20,000 samples, d = 512", 0.5, measured, 0.01)


@torch.no_grad()
def growth(ratio: float, config: TheoryConfig, draws: int = 64) -> Check:
    """E||FFN(z)||^2 / d for ||z||^2 = d."""
    ffn = FeedForward(config.dim, ffn_dim=round(ratio * config.dim), activation="relu").double()
    generator = random_numbers("draws", 0)
    squares = []
    for _ in range(draws):
        draw_linear(ffn.w_up, 1.0, generator)
        draw_linear(ffn.w_down, 1.0, generator)
        z = torch.randn(1, 64, config.dim, generator=generator, dtype=torch.float64)
        squares.append(ffn(z / z.square().mean(-1, keepdim=True).sqrt()).square().mean().item())
    statement = "Lemma 2, any width: the feed-forward adds (2/(1+r))^2 r/2"
    return Check(statement, f"d_ff = {ratio:g} d", ffn_growth(ratio), fmean(squares), 0.05)


def lemma_2_post(found: Measured, config: TheoryConfig) -> Check:
    """E||x + FFN(x)||^2 / d at the last norm of every block."""
    last = "after_feed_forward.join.norm"
    squares = [square for name, square in found["norm_input"].items() if name.endswith(last)]
    statement = "Lemma 2, Post-Norm: E||x^5||^2 / d = 1 + Delta, mean over blocks"
    return Check(statement, f"L = {found['depth']}", 1 + ffn_growth(config.ratio), fmean(squares), 0.06)


def allowance(squares: Sequence[float]) -> float:
    """Relative deviation allowed to a mean over seeds: 5 % for the finite width, and three standard errors.

    >>> allowance([1.0, 1.0])
    0.05
    """
    error = stdev(squares) / math.sqrt(len(squares)) if len(squares) > 1 else 0.0
    return SLACK + 3 * error / fmean(squares)


def lemma_2_pre(found: Measured, config: TheoryConfig) -> Check:
    """The bounds, for every block."""
    depth, delta = found["depth"], ffn_growth(config.ratio)
    squares = found["square"]["x"][::2]
    bounds = [pre_norm_bounds(layer, delta) for layer in range(depth + 1)]
    slack = allowance(found["last_squares"])
    inside = all(
        low * (1 - slack) <= square <= high * (1 + slack) for square, (low, high) in zip(squares, bounds, strict=True)
    )
    statement = "Lemma 2, Pre-Norm, every block: 1 + Delta l <= E||x||^2 / d <= 1 + (1 + Delta) l"
    return Check(
        statement,
        f"L = {depth}, n = {config.tokens}",
        bounds[-1],
        squares[-1],
        slack,
        relation="between",
        everywhere=inside,
    )


def lemma_2_equality(found: Measured, config: TheoryConfig) -> Check:
    """What holds between the bounds."""
    depth = found["depth"]
    exact = pre_norm_growth(depth, config.tokens, ffn_growth(config.ratio))[-1]
    statement = "Lemma 2, Pre-Norm, as an equality for n tokens and d to infinity (ours)"
    return Check(
        statement,
        f"L = {depth}, n = {config.tokens}",
        exact,
        found["square"]["x"][-1],
        allowance(found["last_squares"]),
    )


@torch.no_grad()
def lemma_2_one_token(config: TheoryConfig) -> Check:
    """A sequence of one position meets the upper bound."""
    depth = max(config.depths)
    subjects = (simplified("pre", depth, seed, config, tokens=1) for seed in config.seeds)
    squares = [hidden_squares(run(one, lambda embedding: embedding), ("x",))["x"][-1] for one in subjects]
    upper = pre_norm_bounds(depth, ffn_growth(config.ratio))[1]
    statement = "Lemma 2, Pre-Norm: one token meets the upper bound"
    return Check(statement, f"L = {depth}, n = 1", upper, fmean(squares), allowance(squares))


def lemma_3(found: Sequence[Measured]) -> Check:
    """Largest deviation of a norm's measured Jacobian from the closed form."""
    pairs = [(norm["norm"], norm["exact"]) for one in found for norm in one["norms"] if norm["exact"] is not None]
    worst = max((abs(measured - exact) / (exact or 1.0) for measured, exact in pairs), default=0.0)
    statement = "Lemma 3 as an equality: ||J||_2 = sqrt(d) / ||x - mean(x)||, largest relative deviation"
    return Check(statement, f"{len(pairs)} norms", 0.0, worst, 1e-5)


def theorem_1(config: TheoryConfig) -> list[Check]:
    """The ratio of the last feed-forward matrix's gradients at every depth."""
    statement = "Theorem 1, last gradient: Pre / Post = sqrt((1 + Delta) d / E||x_{L+1}||^2)"
    checks = []
    for depth in config.depths:
        pre, post = last_gradient("pre", depth, config), last_gradient("post", depth, config)
        predicted = last_gradient_ratio(pre.square, ffn_growth(config.ratio))
        checks.append(Check(statement, f"L = {depth}", predicted, pre.gradient / post.gradient, 0.03))
    return checks


def deepnorm_identity(depth: int, config: TheoryConfig) -> Check:
    """2N (v^2 + w^2) / alpha^2 with the alpha of the placement's joins and the beta of its initialization."""
    placement = placements.get("deepnorm")
    join = placement.junctions(config.dim, depth)[1].join
    assert isinstance(join, DeepNormJoin)
    bound = update_bound(depth, join.alpha, branch_gain(placement, depth))
    return Check("DeepNorm's constants: 2N (v^2 + w^2) / alpha^2 = 1", f"N = {depth}", 1.0, bound, 1e-12, DEEPNET)


def update_growth(updates: Mapping[str, Sequence[dict]], depths: Sequence[int]) -> list[Check]:
    """How the first update grows from the lowest to the highest depth."""
    low, high = min(depths), max(depths)

    def grown(placement: str, kind: str) -> float:
        by_depth = {row["depth"]: row[kind] for row in updates[placement]}
        return by_depth[high] / by_depth[low]

    setting, depth_ratio = f"N = {high} over N = {low}", high / low
    sgd, adam = grown("deepnorm", "sgd"), grown("deepnorm", "adam")
    return [
        Check("DeepNorm: first SGD update independent of depth", setting, 1.0, sgd, 0.15, DEEPNET),
        Check("DeepNorm: first Adam update grows as sqrt(N), ours", setting, depth_ratio**0.5, adam, 0.15, DEEPNET),
        Check(
            "Post-Norm: first SGD update grows faster than sqrt(N), ours",
            setting,
            depth_ratio**0.5,
            grown("post", "sgd"),
            0.0,
            DEEPNET,
            relation="at least",
        ),
    ]


def siamese_checks(cosines: Sequence[dict], setting: str) -> list[Check]:
    """cos(X, N(Y)) after the last sublayer, for each constant."""
    return [
        Check(
            f"cos(X, N(Y)) after the last sublayer, 1/c = {row['formula']}",
            setting,
            row["predicted"][-1],
            row["cosine"][-1],
            0.002 + 0.1 * (1 - row["predicted"][-1]),  # random updates are not quite orthogonal
            SIAMESE,
        )
        for row in cosines
    ]
