"""The noising process against diffusers' schedulers, torch's distributions and closed forms, in float64."""

import math
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch.distributions import Normal, kl_divergence

from normstream.diffusion import Process, variational_bound
from normstream.diffusion.process import Posterior, negative_log_likelihood, noise_schedule

STEPS = torch.tensor([0, 1, 17, 500, 999])


def float64(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("ours", "theirs"), [("linear", "linear"), ("cosine", "squaredcos_cap_v2")])
def test_schedules_agree_with_diffusers(ours, theirs):
    scheduler = DDPMScheduler(num_train_timesteps=1000, beta_schedule=theirs)  # its tables are float32
    torch.testing.assert_close(noise_schedule(ours, 1000), scheduler.betas.double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(Process.of(ours, 1000).signal, scheduler.alphas_cumprod.double(), rtol=1e-4, atol=1e-6)


def test_a_shorter_linear_schedule_ends_with_the_same_signal():
    long, short = Process.of("linear", 1000), Process.of("linear", 250)
    assert 0.97 < math.log(short.signal[-1]) / math.log(long.signal[-1]) < 1.03


def test_noised_is_what_diffusers_adds():
    scheduler: Any = DDPMScheduler(beta_schedule="linear")
    images, noise = float64(5, 2, 3, 3), float64(5, 2, 3, 3, seed=1)
    process = Process(scheduler.alphas_cumprod.double())
    noisy = process.noised(images, STEPS, noise)
    torch.testing.assert_close(noisy, scheduler.add_noise(images, noise, STEPS).double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(process.clean(noisy, STEPS, noise), images, rtol=0, atol=1e-9)


def test_the_posterior_is_bayes_rule():
    """q(x_{t-1} | x_t, x_0) is q(x_t | x_{t-1}) q(x_{t-1} | x_0) up to a factor: log densities differ by a constant."""
    process, t = Process.of("cosine", 100), 40
    clean, noisy = torch.tensor(0.3, dtype=torch.float64), torch.tensor(-0.8, dtype=torch.float64)
    shape = (1, 1, 1, 1)
    mean, log_variance = process.posterior(clean.view(shape), noisy.view(shape), torch.tensor([t]))
    places = torch.linspace(-2, 2, 9, dtype=torch.float64)
    beta, before = process.betas[t], process.signal[t - 1]
    joint = Normal((1 - beta).sqrt() * places, beta.sqrt()).log_prob(noisy)
    joint = joint + Normal(before.sqrt() * clean, (1 - before).sqrt()).log_prob(places)
    difference = joint - Normal(mean.flatten(), (0.5 * log_variance).exp().flatten()).log_prob(places)
    torch.testing.assert_close(difference, difference[:1].expand(9), rtol=0, atol=1e-9)


def test_a_spaced_process_keeps_the_signal():
    process = Process.of("cosine", 1000)
    some = process.spaced([3, 10, 700])
    assert torch.equal(some.signal, process.signal[[3, 10, 700]])
    torch.testing.assert_close((1 - some.betas).cumprod(0), some.signal, rtol=1e-12, atol=0)
    assert some.spaced(2).times.tolist() == [3, 700]
    assert process.spaced(1).times.tolist() == [999]
    assert torch.equal(process.spaced(1000).betas, process.betas)


@pytest.mark.parametrize("steps", [0, 1001, [], [5, 5], [-1, 3], [3, 1000]])
def test_a_spaced_process_refuses_steps_that_are_not_there(steps):
    with pytest.raises(ValueError, match="steps"):
        Process.of("linear", 1000).spaced(steps)


@pytest.mark.untyped
def test_wrong_schedules_are_refused():
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        noise_schedule("liner", 10)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least 1 step"):
        noise_schedule("linear", 0)
    with pytest.raises(ValueError, match="signal must fall"):
        Process(torch.tensor([0.5, 0.6]))


def bound_inputs(step: int) -> tuple[Process, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    process, t = Process.of("linear", 1000), torch.tensor([step, step])
    clean = (float64(2, 3, 4, 4).clamp(-1, 1) * 127.5 + 127.5).round() / 127.5 - 1
    noisy = process.noised(clean, t, float64(2, 3, 4, 4, seed=1))
    return process, clean, noisy, t, float64(2, 6, 4, 4, seed=2)


@pytest.mark.parametrize("step", [1, 300, 999])
def test_the_bound_is_torchs_divergence_of_two_normals(step):
    process, clean, noisy, t, output = bound_inputs(step)
    noise, fraction = output.chunk(2, dim=1)
    signal, before, beta = process.signal[step], process.signal[step - 1], process.betas[step]
    small = beta * (1 - before) / (1 - signal)

    def mean(x0):  # equation 7 of DDPM
        return (before.sqrt() * beta * x0 + (1 - beta).sqrt() * (1 - before) * noisy) / (1 - signal)

    predicted = (noisy - (1 - signal).sqrt() * noise) / signal.sqrt()
    variance = beta ** ((fraction + 1) / 2) * small ** (1 - (fraction + 1) / 2)
    nats = kl_divergence(Normal(mean(clean), small.sqrt().expand_as(clean)), Normal(mean(predicted), variance.sqrt()))
    ours = variational_bound(process, clean, noisy, t, output)
    torch.testing.assert_close(ours, nats.flatten(1).mean(1) / math.log(2), rtol=1e-9, atol=1e-12)


def test_the_bound_at_step_0_is_a_likelihood_of_256_levels():
    """The probabilities of all levels sum to 1, and inner ones are differences of torch's cdf."""
    levels = (torch.arange(256, dtype=torch.float64) / 127.5 - 1)[:, None]
    wide = Posterior(torch.full((1,), 0.3, dtype=torch.float64), torch.full((1,), -1.0, dtype=torch.float64))
    probability = (-negative_log_likelihood(levels, wide)).exp()
    assert abs(probability.sum().item() - 1) < 1e-12
    normal = Normal(wide.mean, (0.5 * wide.log_variance).exp())
    inner = normal.cdf(levels[1:-1] + 1 / 255) - normal.cdf(levels[1:-1] - 1 / 255)
    torch.testing.assert_close(probability[1:-1], inner, rtol=1e-9, atol=0)

    process, clean, noisy, t, output = bound_inputs(0)
    noise, fraction = output.chunk(2, dim=1)
    predicted = process.clean(noisy, t, noise)  # the posterior's mean at step 0 is x_0 itself
    first = process.posterior_log_variance[0]
    log_variance = first + (fraction + 1) / 2 * (process.betas[0].log() - first)
    nats = negative_log_likelihood(clean, Posterior(predicted, log_variance)).flatten(1).mean(1)
    torch.testing.assert_close(variational_bound(process, clean, noisy, t, output), nats / math.log(2))


@pytest.mark.parametrize("step", [0, 300])
def test_the_bound_teaches_the_variance_only(step):
    process, clean, noisy, t, output = bound_inputs(step)
    output.requires_grad_()
    variational_bound(process, clean, noisy, t, output).sum().backward()
    assert output.grad is not None
    of_noise, of_variance = output.grad.chunk(2, dim=1)
    assert of_noise.abs().max() == 0
    assert of_variance.abs().min() > 0


def test_far_off_predictions_keep_the_likelihood_finite():
    levels = torch.tensor([-1.0, 0.0, 1.0])
    narrow = Posterior(torch.tensor([9.0, 9.0, -9.0]), torch.full((3,), -9.0))
    assert negative_log_likelihood(levels, narrow).isfinite().all()
