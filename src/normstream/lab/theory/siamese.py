"""Whether SiameseNorm's two streams carry the same vector: cos(X, N(Y)) by sublayer, with its real junctions.

With orthogonal updates of RMS 1 and an embedding of RMS 1, Y has RMS sqrt(s + 1) before sublayer s, so that
N(Y) <- N(N(Y) + o / sqrt(s + 1)), the recursion of X with the constant ``sublayer``: X and N(Y) are one vector, and the
constant is the dilution that Pre-Norm has anyway.
"""

from typing import Any

import torch
import torch.nn.functional as F

from normstream import placements
from normstream.lab.theory.predictions import siamese_cosine
from normstream.norms import NormConfig

WIDTH, BLOCKS = 4096, 16
CONSTANTS = {"sublayer": "1/sqrt(s+1)", "code": "1/sqrt(2(l+1))", "paper": "1/sqrt(l+1)", "none": "1"}


@torch.no_grad()
def stream_cosines(
    constant: str, seed: int, *, dim: int = WIDTH, n_layers: int = BLOCKS, orthogonal: bool = False
) -> dict[str, Any]:
    """cos(X, N(Y)) at every border, for random updates that do not depend on the streams.

    Args:
        constant: value of ``depth_scale``.
        seed: of the embedding and the updates, Gaussian and scaled to RMS 1.
        dim: width.
        n_layers: blocks, each of two sublayers.
        orthogonal: whether they are orthogonal to each other exactly instead of nearly.

    >>> round(stream_cosines("sublayer", 0, dim=64, n_layers=4, orthogonal=True)["cosine"][-1], 6)
    1.0
    """
    placement = placements.get(f"siamese(depth_scale={constant})")
    row = placement.junctions(dim, n_layers, norm=NormConfig(kind="rms", eps=0.0))
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(dim, len(row), generator=generator, dtype=torch.float64)
    if orthogonal:
        vectors = torch.linalg.qr(vectors).Q
    vectors = vectors / vectors.square().mean(0).sqrt()
    state: Any = ()
    cosines = []
    for junction, update in zip(row, vectors.T, strict=True):
        read: Any = junction.double().read
        state, _ = junction(state, update[None, None])
        x, y = state
        cosines.append(F.cosine_similarity(x, read.norm_y(y), dim=-1).item())
    joins: list[Any] = [junction.join for junction in row[1:]]
    scales = [join.scale for join in joins]
    predicted = [siamese_cosine(scales[:s]) for s in range(len(row))]
    return {"constant": constant, "formula": CONSTANTS[constant], "cosine": cosines, "predicted": predicted}
