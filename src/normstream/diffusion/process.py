"""The process that turns images into noise, its posterior, and the loss that a model of the noise is trained with.

    x_t = sqrt(s_t) x_0 + sqrt(1 - s_t) e          e standard normal, s_t the signal that is left at step t
    beta_t = 1 - s_t / s_(t-1), with s_(-1) = 1

Shape suffixes: B batch, N steps; images are (B, C, H, W).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from normstream.names import check_choice
from normstream.norms import precise_dtype

Schedule = Literal["linear", "cosine"]


def noise_schedule(schedule: Schedule, steps: int) -> Tensor:
    """beta of every step, (steps,) in float64.

    ``linear`` runs from 1e-4 to 0.02 over 1000 steps; with another number of steps beta is scaled by 1000 / steps.
    ``cosine`` has the signal ``cos^2((u + 0.008) / 1.008 * pi / 2)`` at the part u of the way, with beta at most 0.999.

    Sources: Ho et al. 2020, arXiv 2006.11239; Nichol and Dhariwal 2021, arXiv 2102.09672.

    >>> noise_schedule("linear", 1000)[[0, -1]].tolist()
    [0.0001, 0.02]
    """
    check_choice("schedule", schedule, Schedule)
    if steps < 1:
        raise ValueError(f"a noise schedule needs at least 1 step, got {steps}")
    if schedule == "linear":
        scale = 1000 / steps
        return torch.linspace(1e-4 * scale, 0.02 * scale, steps, dtype=torch.float64).clamp(max=0.999)
    angle = (torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * math.pi / 2
    signal = angle.cos().square()
    return (1 - signal[1:] / signal[:-1]).clamp(max=0.999)


class Posterior(NamedTuple):
    """A normal distribution of ``x_(t-1)``."""

    mean: Tensor
    """Like the images."""
    log_variance: Tensor
    """Logarithm of the variance, of a shape that broadcasts to the images'."""


class Process:
    """The noising process and its exact posterior; the tables are float64.

    A process may have fewer steps than the one that the model was trained with: ``times`` says, for each step, which
    timestep the model knows it as.

    Args:
        signal: s of every step, falling, in (0, 1).
        times: the model's timestep of every step, rising; None counts from 0.

    Raises:
        ValueError: for a signal that does not fall, or one outside (0, 1).

    Sources: as ``noise_schedule``. The tables agree with ``diffusers``' schedulers.

    >>> process = Process.of("cosine", 1000)
    >>> len(process), process.spaced(50).times[[0, -1]].tolist()
    (1000, [0, 999])
    """

    def __init__(self, signal: Tensor, times: Tensor | None = None) -> None:
        self.signal = signal.double().cpu()
        self.times = torch.arange(len(signal)) if times is None else times
        self.previous_signal = torch.cat([self.signal.new_ones(1), self.signal[:-1]])
        if not (self.signal.min() > 0 and (self.signal < self.previous_signal).all()):
            raise ValueError(f"the signal must fall from below 1 to above 0, got {self.signal.tolist()[:3]} ...")
        self.betas = 1 - self.signal / self.previous_signal
        variance = self.betas * (1 - self.previous_signal) / (1 - self.signal)
        # the first is 0, whose logarithm is none: it takes the second's, or where there is one step only, its beta
        self.posterior_log_variance = torch.cat([(variance[1:2] if len(variance) > 1 else self.betas), variance[1:]])
        self.posterior_log_variance = self.posterior_log_variance.log()

    @staticmethod
    def of(schedule: Schedule, steps: int) -> "Process":
        """The process with this noise schedule."""
        return Process((1 - noise_schedule(schedule, steps)).cumprod(0))

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.signal)

    def spaced(self, steps: int | Sequence[int]) -> "Process":
        """The process that visits only some of the steps: that many, evenly from the first to the last, or these.

        Raises ValueError for more steps than there are, or steps that do not rise within them.
        """
        if isinstance(steps, int):
            if not 1 <= steps <= len(self):
                raise ValueError(f"sampling takes from 1 to {len(self)} steps, got {steps}")
            chosen = torch.linspace(0, len(self) - 1, steps, dtype=torch.float64).round().long()
            if steps == 1:
                chosen = torch.tensor([len(self) - 1])
        else:
            chosen = torch.tensor(list(steps), dtype=torch.int64)
            inside = len(chosen) > 0 and chosen[0] >= 0 and chosen[-1] < len(self)
            if not inside or (chosen[1:] <= chosen[:-1]).any():
                raise ValueError(f"steps must rise from at least 0 to at most {len(self) - 1}, got {list(steps)[:5]}")
        return Process(self.signal[chosen], self.times[chosen])

    def at(self, table: Tensor, step_B: Tensor, images: Tensor) -> Tensor:
        """Values of a table at the steps of a batch, shaped to multiply images, in float32 or above."""
        values = table.to(step_B.device)[step_B].to(precise_dtype(images))
        return values.view(-1, *(1,) * (images.ndim - 1))

    def noised(self, images: Tensor, step_B: Tensor, noise: Tensor) -> Tensor:
        """x_t of clean images and noise.

        >>> Process.of("linear", 1000).noised(torch.ones(1, 1, 1, 1), torch.tensor([999]), torch.ones(1, 1, 1, 1)) > 1
        tensor([[[[True]]]])
        """
        return self.at(self.signal.sqrt(), step_B, images) * images + self._noise_scale(step_B, images) * noise

    def _noise_scale(self, step_B: Tensor, images: Tensor) -> Tensor:
        return self.at((1 - self.signal).sqrt(), step_B, images)

    def clean(self, noisy: Tensor, step_B: Tensor, noise: Tensor) -> Tensor:
        """The x_0 that, with this noise, gives x_t: the inverse of ``noised``."""
        return (noisy - self._noise_scale(step_B, noisy) * noise) / self.at(self.signal.sqrt(), step_B, noisy)

    def posterior(self, clean: Tensor, noisy: Tensor, step_B: Tensor) -> Posterior:
        """``q(x_(t-1) | x_t, x_0)``; at step 0, where the variance is 0, with the log variance of step 1."""
        of_clean = self.betas * self.previous_signal.sqrt() / (1 - self.signal)
        of_noisy = (1 - self.betas).sqrt() * (1 - self.previous_signal) / (1 - self.signal)
        mean = self.at(of_clean, step_B, clean) * clean + self.at(of_noisy, step_B, clean) * noisy
        return Posterior(mean, self.at(self.posterior_log_variance, step_B, clean))

    def learned_log_variance(self, fraction: Tensor, step_B: Tensor) -> Tensor:
        """Log variance from a model's output f: ``v log beta_t + (1 - v) log(posterior variance)``, v = (f + 1) / 2."""
        low, high = self.at(self.posterior_log_variance, step_B, fraction), self.at(self.betas.log(), step_B, fraction)
        return low + (fraction + 1) / 2 * (high - low)


def variational_bound(process: Process, clean: Tensor, noisy: Tensor, step_B: Tensor, output: Tensor) -> Tensor:
    """The term of the variational bound at each sample's step, (B,), in bits per value of the image.

    At step t > 0 it is ``KL(q(x_(t-1) | x_t, x_0) || p(x_(t-1) | x_t))``; at step 0 the negative log-likelihood of x_0,
    of which every value stands for a bin of width 2/255 in [-1, 1], with open ends. p has the mean that the predicted
    noise implies, without a gradient, and the learned variance: the bound teaches the variance only.

    Args:
        process: of training.
        clean, noisy: x_0 and x_t, (B, C, H, W).
        step_B: t.
        output: of the model, (B, 2C, H, W): noise and variance.

    Source: Nichol and Dhariwal 2021, arXiv 2102.09672, section 3.1 (L_hybrid); openai/improved-diffusion.

    >>> process, ones = Process.of("linear", 1000), torch.ones(1, 1, 1, 1)
    >>> variational_bound(process, 0 * ones, 0 * ones, torch.tensor([5]), torch.cat([0 * ones, -ones], dim=1))
    tensor([0.])
    """
    noise, fraction = output.detach().chunk(2, dim=1)[0], output.chunk(2, dim=1)[1]
    true = process.posterior(clean, noisy, step_B)
    model = Posterior(
        process.posterior(process.clean(noisy, step_B, noise), noisy, step_B).mean,
        process.learned_log_variance(fraction, step_B),
    )
    first = (step_B == 0).view(-1, *(1,) * (clean.ndim - 1))
    nats = torch.where(first, negative_log_likelihood(clean, model), kl_divergence(true, model))
    return nats.flatten(1).mean(1) / math.log(2)


def kl_divergence(p: Posterior, q: Posterior) -> Tensor:
    """``KL(p || q)`` of two normal distributions, value by value, in nats.

    >>> kl_divergence(Posterior(torch.ones(1), torch.zeros(1)), Posterior(torch.zeros(1), torch.zeros(1)))
    tensor([0.5000])
    """
    difference = p.log_variance - q.log_variance
    return 0.5 * (difference.expm1() - difference + (p.mean - q.mean).square() * (-q.log_variance).exp())


def negative_log_likelihood(images: Tensor, p: Posterior) -> Tensor:
    """``-log p(bin)``, value by value in nats, where bins of width 2/255 around 256 levels in [-1, 1] are what is seen.

    The lowest and the highest bin reach to infinity.

    >>> wide = Posterior(torch.zeros(1), torch.full((1,), 40.0))
    >>> negative_log_likelihood(torch.tensor([-1.0]), wide)  # half of everything is below
    tensor([0.6931])
    """
    scale = (-0.5 * p.log_variance).exp()
    upper, lower = ((images - p.mean + side / 255) * scale for side in (1, -1))
    # the side of 0 where the normal distribution has its small values, which keep their precision there
    inner = torch.where(
        images > p.mean, torch.special.ndtr(-lower) - torch.special.ndtr(-upper), _difference(lower, upper)
    )
    inner = inner.clamp(min=torch.finfo(inner.dtype).tiny).log()
    log_p = torch.where(images > 0.999, torch.special.log_ndtr(-lower), inner)
    return -torch.where(images < -0.999, torch.special.log_ndtr(upper), log_p)


def _difference(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.special.ndtr(upper) - torch.special.ndtr(lower)
