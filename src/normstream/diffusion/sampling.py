"""From noise to images: guidance, and the samplers of DDPM and of DDIM.

Shape suffixes: B batch, C channels, H height, W width, E outputs of the model: C or 2 C.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from normstream.checks import check_types
from normstream.diffusion.process import Process
from normstream.models.evaluating import evaluating
from normstream.names import check_choice

Sampler = Literal["ddim", "ddpm"]


@dataclass(frozen=True)
class SamplingConfig:
    """How images are drawn from a model; every value is checked when it is made.

    >>> SamplingConfig(steps=0)
    Traceback (most recent call last):
    ValueError: sampling.steps must be at least 1, got 0
    """

    sampler: Sampler = "ddim"
    """ddim, which eta = 0 makes deterministic, or ddpm."""
    steps: int = 50
    """Steps, evenly over those of training."""
    guidance: float = 4.0
    """Scale s of classifier-free guidance, u + s (c - u), 4 as in DiT's released sampling; 1 is none."""
    eta: float = 0.0
    """Noise of ddim: 0 none, 1 as much as the posterior has."""
    clip: bool = True
    """Whether the image predicted at each step is clipped to [-1, 1]; for pixels, not for latents."""

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("sampling.sampler", self.sampler, Sampler)
        if self.steps < 1:
            raise ValueError(f"sampling.steps must be at least 1, got {self.steps}")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"sampling.eta must be in [0, 1], got {self.eta}")
        if self.sampler == "ddpm" and self.eta:
            raise ValueError(f"sampling.eta is for ddim, but sampling.sampler is ddpm; leave it at 0, got {self.eta}")


def guided(
    model: Any,
    images_BCHW: Float[Tensor, "B C H W"],
    timesteps_B: Num[Tensor, "B"],  # noqa: F821
    labels_B: Int[Tensor, "B"],  # noqa: F821
    scale: float,
) -> Float[Tensor, "B E H W"]:
    """The model's output with classifier-free guidance: of the noise ``u + s (c - u)``, of the variance c's.

    c is the output for the labels and u that for the null label; scale 1 is c itself, in one pass without u. All
    channels of the noise are guided; DiT's released code guides the first three of the latent's four by default.

    Raises:
        ValueError: for a scale other than 1 if the model has no null label.

    Source: Ho and Salimans 2022, arXiv 2207.12598, whose w is s - 1.

    >>> from normstream.models import DiT, DiTConfig
    >>> model = DiT(DiTConfig(image_size=4, channels=1, dim=8, n_layers=1, n_heads=2)).eval()
    >>> guided(model, torch.zeros(2, 1, 4, 4), torch.zeros(2), torch.tensor([0, 1]), scale=2.0).shape
    torch.Size([2, 2, 4, 4])
    """
    if scale == 1:
        return model(images_BCHW, timesteps_B, labels_B)
    null_B = torch.full_like(labels_B, model.null_label)
    both = model(torch.cat([images_BCHW] * 2), torch.cat([timesteps_B] * 2), torch.cat([labels_B, null_B]))
    conditional, unconditional = both.chunk(2)
    n_channels = images_BCHW.shape[1]
    c, u = conditional[:, :n_channels], unconditional[:, :n_channels]
    return torch.cat([u + scale * (c - u), conditional[:, n_channels:]], dim=1)


def ddpm_step(
    process: Process, step: int, noisy: Tensor, output: Tensor, noise: Tensor, *, clip: bool = False
) -> Tensor:
    """x of the step before, drawn from ``N(posterior mean, variance)``; at step 0 the mean itself.

    The variance is the learned one if the output has it, else the posterior's.

    Args:
        process: with as many steps as are taken.
        step: index of the step.
        noisy: x of this step.
        output: of the model: noise, or noise and variance.
        noise: standard normal.
        clip: whether the predicted image is clipped to [-1, 1].

    Sources: Ho et al. 2020, arXiv 2006.11239; with fewer steps Nichol and Dhariwal 2021, arXiv 2102.09672.

    >>> process, zero = Process.of("linear", 1000), torch.zeros(1, 1, 2, 2)
    >>> ddpm_step(process, 0, zero, zero, torch.ones_like(zero)).abs().max().item()
    0.0
    """
    n_channels = noisy.shape[1]
    step_B = torch.full((len(noisy),), step, device=noisy.device)
    clean = _clean(process, step_B, noisy, output[:, :n_channels], clip)
    mean, log_variance = process.posterior(clean, noisy, step_B)
    if output.shape[1] > n_channels:
        log_variance = process.learned_log_variance(output[:, n_channels:], step_B)
    return mean if step == 0 else mean + (0.5 * log_variance).exp() * noise


def ddim_step(
    process: Process,
    step: int,
    noisy: Tensor,
    output: Tensor,
    noise: Tensor | None = None,
    *,
    eta: float = 0.0,
    clip: bool = False,
) -> Tensor:
    """``sqrt(s') x_0 + sqrt(1 - s' - v) e + sqrt(v) noise`` with s' the signal of the step before.

    x_0 is the predicted image, e the predicted noise, or the noise that the clipped image implies, and
    ``v = eta^2 (posterior variance)``. A learned variance is not used. Arguments as for ``ddpm_step``.

    Source: Song et al. 2020, arXiv 2010.02502.

    >>> process, zero = Process.of("linear", 1000), torch.zeros(1, 1, 2, 2)
    >>> ddim_step(process, 9, zero, zero).abs().max().item()
    0.0
    """
    predicted = output[:, : noisy.shape[1]]
    step_B = torch.full((len(noisy),), step, device=noisy.device)
    clean = _clean(process, step_B, noisy, predicted, clip)
    signal, before = process.signal[step].item(), process.previous_signal[step].item()
    if clip:
        predicted = (noisy - signal**0.5 * clean) / (1 - signal) ** 0.5
    variance = eta**2 * process.betas[step].item() * (1 - before) / (1 - signal)
    mean = before**0.5 * clean + max(0.0, 1 - before - variance) ** 0.5 * predicted
    return mean if noise is None or variance == 0 else mean + variance**0.5 * noise


def _clean(process: Process, step_B: Tensor, noisy: Tensor, noise: Tensor, clip: bool) -> Tensor:
    clean = process.clean(noisy, step_B, noise)
    return clean.clamp(-1, 1) if clip else clean


@torch.no_grad()
def sample(
    model: Any,
    process: Process,
    labels_B: Int[Tensor, "B"],  # noqa: F821
    config: SamplingConfig | None = None,
    *,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Float[Tensor, "B C H W"]:
    """Images of these classes, drawn with a model in evaluation mode; its mode is restored.

    Args:
        model: a ``DiT``, or what has its ``config``, its ``null_label`` and its arguments.
        process: that of training.
        labels_B: classes.
        config: sampler, steps, guidance.
        seed: of the noise, which is drawn on the CPU in one piece, so that any device starts from the same.
        on_step: called with the number of steps done.

    Raises:
        ValueError: for more steps than the process has, and as the model does.

    >>> from normstream.models import DiT, DiTConfig
    >>> model = DiT(DiTConfig(image_size=4, channels=1, dim=8, n_layers=1, n_heads=2))
    >>> sample(model, Process.of("linear", 1000), torch.tensor([0, 1]), SamplingConfig(steps=2)).shape
    torch.Size([2, 1, 4, 4])
    """
    config = config or SamplingConfig()
    spaced, weight = process.spaced(config.steps), next(model.parameters())
    shape = (len(labels_B), model.config.channels, model.config.image_size, model.config.image_size)
    generator = torch.Generator().manual_seed(seed)
    labels_B = labels_B.to(weight.device)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator).to(weight)

    images = normal()
    with evaluating(model):
        for step in reversed(range(len(spaced))):
            times_B = spaced.times[step].to(weight.device).expand(len(labels_B))
            output = guided(model, images, times_B, labels_B, config.guidance)
            if config.sampler == "ddpm":
                images = ddpm_step(spaced, step, images, output, normal(), clip=config.clip)
            else:
                noise = normal() if config.eta > 0 else None
                images = ddim_step(spaced, step, images, output, noise, eta=config.eta, clip=config.clip)
            if on_step is not None:
                on_step(len(spaced) - step)
    return images
