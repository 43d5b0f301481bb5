"""What the papers predict, as formulas: nothing here touches a model."""

import math
from collections.abc import Sequence

PREDICTED_COSINES = {"sublayer": 0.9999, "code": 0.998, "paper": 0.950, "none": 0.44}
"""cos(X, N(Y)) of SiameseNorm at width 4096 and 16 blocks, by the constant of the x stream."""


def ffn_growth(ratio: float) -> float:
    """What the feed-forward adds to E||x||^2 / d when its input has ||z||^2 = d: Delta = (2 / (1 + r))^2 r / 2.

    With Gaussian Xavier both matrices have entries of variance 2 / ((1 + r) d), and ReLU halves the square. Xiong et
    al. have r = 1.

    >>> [round(ffn_growth(r), 3) for r in (1, 2, 4)]
    [0.5, 0.444, 0.32]
    """
    return (2 / (1 + ratio)) ** 2 * ratio / 2


def pre_norm_bounds(layer: int, growth: float) -> tuple[float, float]:
    """Lemma 2 for Pre-Norm: (1 + Delta l) d <= E||x_{l+1}||^2 <= (1 + (1 + Delta) l) d after l blocks.

    >>> pre_norm_bounds(4, growth=0.5)
    (3.0, 7.0)
    """
    return 1 + growth * layer, 1 + (1 + growth) * layer


def pre_norm_growth(n_layers: int, tokens: int, growth: float) -> list[float]:
    """E||x||^2 / d of Pre-Norm after 0, 1, ..., L blocks of the simplified model as d goes to infinity: an equality.

    q = E||x_i||^2 / d and p = E<x_i, x_j> / d evolve together. Attention adds the mean of n normalized vectors, the
    same to all, of square m = 1/n + (1 - 1/n) p/q; the feed-forward adds Delta to q and Delta kappa(p/q) to p, with
    kappa(c) = (sqrt(1 - c^2) + c (pi - arccos c)) / pi, the arc-cosine kernel of ReLU. One token meets the upper bound.

    >>> pre_norm_growth(2, tokens=1, growth=0.5)
    [1.0, 2.5, 4.0]
    """
    q, p, squares = 1.0, 0.0, [1.0]
    for _ in range(n_layers):
        mean = 1 / tokens + (1 - 1 / tokens) * p / q
        q, p = q + mean, p + mean
        cosine = min(1.0, p / q)
        kernel = (math.sqrt(1 - cosine**2) + cosine * (math.pi - math.acos(cosine))) / math.pi
        q, p = q + growth, p + growth * kernel
        squares.append(q)
    return squares


def last_gradient_ratio(square: float, growth: float) -> float:
    """Theorem 1 sharpened: last-layer gradient of Pre-Norm over Post-Norm, sqrt((1 + Delta) d / E||x_{L+1}||^2).

    Both gradients pass one LayerNorm, whose Jacobian has the norm sqrt(d) / ||input||; the inputs are x_{L+1} and the
    sum of Lemma 2 for Post-Norm.

    >>> last_gradient_ratio(6.0, growth=0.5)
    0.5
    """
    return math.sqrt((1 + growth) / square)


def update_bound(n_layers: int, alpha: float, beta: float) -> float:
    """2N (v^2 + w^2) / alpha^2 with v = w = beta: DeepNet's bound on the first model update, up to a constant.

    DeepNorm's constants make it 1, those of Post-Norm 4N.

    >>> round(update_bound(8, alpha=16**0.25, beta=64**-0.25), 12), update_bound(8, alpha=1.0, beta=1.0)
    (1.0, 32.0)
    """
    return 2 * n_layers * 2 * beta**2 / alpha**2


def siamese_cosine(scales: Sequence[float]) -> float:
    """cos(X, Y) for orthogonal updates of RMS 1 and factors 1 / c_s on x, followed in their coordinates alone.

    X = N(X + o_s / c_s) and Y = Y + o_s live in the span of the embedding and the updates, which are orthonormal but
    for a common factor: a coefficient for each is all there is to know.

    >>> round(siamese_cosine([(s + 1) ** -0.5 for s in range(32)]), 9)
    1.0
    """
    x = [1.0]
    for scale in scales:
        length = math.sqrt(sum(c * c for c in x) + scale * scale)
        x = [c / length for c in (*x, scale)]
    return sum(x) / math.sqrt(sum(c * c for c in x) * len(x))
