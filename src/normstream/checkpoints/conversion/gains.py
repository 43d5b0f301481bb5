"""The convention of gains: a norm multiplies by its weight w (plain) or by 1 + w (zero_centered).

Nothing in a file tells them apart: same names, shapes and dtypes. So the convention travels with each norm. It comes
from what the user says, else from the metadata of a file that normstream wrote, else from the format: a family of
transformers has one, Megatron has an argument for it. The values themselves can only contradict that.

The sum 1 + w is taken in float32 (float64 for float64) and stored so; w is kept as it is where nothing has to change.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from normstream.checkpoints.conversion.roles import Role
from normstream.norms import Gain

NEAR = 0.2
"""How close to 0 or to 1 the mean of a norm's weights must be to say anything."""
NEGATIVE = 0.1
"""Share of a norm's weights that are not positive, above which they may be offsets from 1."""


def with_gain(weight: Tensor, stored: Gain, wanted: Gain) -> Tensor:
    """The weight that is the same gain in another convention, at least in float32.

    >>> with_gain(torch.tensor([0.25]), "zero_centered", "plain")
    tensor([1.2500])
    >>> with_gain(torch.tensor([1.25]), "plain", "zero_centered")
    tensor([0.2500])
    """
    if stored == wanted:
        return weight
    precise = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.to(precise) + _shift(stored, wanted)


def rounding(weight: Tensor, stored: Gain, wanted: Gain) -> float:
    """The largest error that ``with_gain`` makes.

    >>> rounding(torch.tensor([2.0**-30]), "zero_centered", "plain") == 2.0**-30
    True
    """
    if stored == wanted:
        return 0.0
    exact = weight.double() + _shift(stored, wanted)
    return (with_gain(weight, stored, wanted).double() - exact).abs().max().item()


def check_gains(weights: Mapping[Role, Tensor], gains: Mapping[Role, Gain]) -> None:
    """Compares the values of gains with the convention that a format has.

    Values never decide: they raise ValueError if most norms say the opposite.

    >>> role = Role("final_norm")
    >>> check_gains({role: torch.ones(4)}, {role: "zero_centered"})
    Traceback (most recent call last):
    ValueError: the format stores gains as w of 1 + w (zero_centered), but the values of 1 of 1 norms look as if w were
    the gain itself (plain); say which it is with --stored-gain plain or --stored-gain zero_centered
    """
    for gain, looks_other, other in (
        ("plain", looks_zero_centered, "zero_centered"),
        ("zero_centered", looks_plain, "plain"),
    ):
        chosen = [weights[role] for role in weights if gains[role] == gain]
        contradict = sum(looks_other(weight) for weight in chosen)
        if 2 * contradict > len(chosen):
            raise ValueError(
                f"the format stores gains as {_WORDS[gain]}, but the values of {contradict} of {len(chosen)} norms "
                f"look as if {_WORDS[other]}; say which it is with --stored-gain plain or --stored-gain zero_centered"
            )


def looks_plain(weight: Tensor) -> bool:
    """Whether the values are around 1, as gains are at their start.

    >>> looks_plain(torch.tensor([0.9, 1.1])), looks_plain(torch.tensor([0.1, 0.2]))
    (True, False)
    """
    return abs(weight.double().mean().item() - 1) < NEAR


def looks_zero_centered(weight: Tensor) -> bool:
    """Whether the values are on both sides of 0. Trained gains can be small too, but hardly any is negative.

    >>> looks_zero_centered(torch.tensor([-0.1, 0.1])), looks_zero_centered(torch.tensor([0.1, 0.2]))
    (True, False)
    """
    is_near = abs(weight.double().mean().item()) < NEAR
    return is_near and (weight <= 0).double().mean().item() > NEGATIVE


_WORDS = {"plain": "w were the gain itself (plain)", "zero_centered": "w of 1 + w (zero_centered)"}


def _shift(stored: Gain, wanted: Gain) -> float:
    return {("zero_centered", "plain"): 1.0, ("plain", "zero_centered"): -1.0}[stored, wanted]
