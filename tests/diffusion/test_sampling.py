"""Samplers step by step against diffusers' schedulers in float64, and guidance against its equation."""

from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

from normstream.diffusion import Process, SamplingConfig, guided, sample
from normstream.diffusion.sampling import ddim_step, ddpm_step
from normstream.init import initialize
from normstream.models import DiT, DiTConfig

PROCESS = Process.of("linear", 1000)
LEADING = list(range(0, 1000, 50))  # the steps that diffusers' DDIM takes by default, 20 of them


def in_float64(scheduler: Any) -> Any:
    """The scheduler with its tables in float64, by the definition of the linear schedule."""
    scheduler.betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    scheduler.alphas = 1 - scheduler.betas
    scheduler.alphas_cumprod = scheduler.alphas.cumprod(0)
    scheduler.one = torch.tensor(1.0, dtype=torch.float64)
    if hasattr(scheduler, "final_alpha_cumprod"):
        scheduler.final_alpha_cumprod = scheduler.one
    return scheduler


def outputs_for(x: torch.Tensor, t: int, channels: int) -> torch.Tensor:
    """Something that depends on x and t, as a model's output would."""
    return torch.cat([torch.sin(x * (i + 1) + t / 100) for i in range(channels)], dim=1)


def start(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("variance_type", "channels"), [("fixed_small", 1), ("learned_range", 2)])
def test_ddpm_is_diffusers_ddpm(variance_type, channels, clip):
    times = [0, 3, 77, 400, 401, 999]
    scheduler = in_float64(DDPMScheduler(variance_type=variance_type, clip_sample=clip))
    scheduler.set_timesteps(timesteps=times[::-1])
    spaced = PROCESS.spaced(times)
    ours = theirs = start()
    for step in reversed(range(len(times))):
        output = outputs_for(theirs, times[step], channels)
        noise = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        ours = ddpm_step(spaced, step, ours, outputs_for(ours, times[step], channels), noise, clip=clip)
        generator = torch.Generator().manual_seed(step)
        theirs = scheduler.step(output, times[step], theirs, generator=generator).prev_sample
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not torch.equal(ours, start())


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_is_diffusers_ddim(eta, clip):
    scheduler = in_float64(DDIMScheduler(clip_sample=clip, timestep_spacing="leading"))
    scheduler.set_timesteps(len(LEADING))
    assert scheduler.timesteps.tolist() == LEADING[::-1]
    spaced = PROCESS.spaced(LEADING)
    ours = theirs = start()
    for step in reversed(range(len(LEADING))):
        noise = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        output = outputs_for(theirs, LEADING[step], 1)
        ours = ddim_step(spaced, step, ours, outputs_for(ours, LEADING[step], 1), noise, eta=eta, clip=clip)
        theirs = scheduler.step(
            output, LEADING[step], theirs, eta=eta, use_clipped_model_output=clip, variance_noise=noise
        ).prev_sample
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_perfect_model_finds_the_image_in_one_step():
    image, noise = start(1).clamp(-1, 1), start(2)
    noisy = PROCESS.noised(image, torch.tensor([600, 600]), noise)
    spaced = PROCESS.spaced([600])
    torch.testing.assert_close(ddim_step(spaced, 0, noisy, noise), image, rtol=0, atol=1e-9)
    torch.testing.assert_close(ddpm_step(spaced, 0, noisy, noise, noise), image, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def model() -> DiT:
    """A model whose output is not 0 and depends on everything."""
    model = DiT(DiTConfig(image_size=4, channels=3, dim=8, n_layers=2, n_heads=2, n_classes=3)).double()
    for i, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(i))
    return model.eval()


def test_guidance(model):
    """Scale 1 is no guidance, scale 2 is u + 2 (c - u); the variance is the conditional one."""
    x, t, labels = start(3), torch.tensor([5, 900]), torch.tensor([0, 2])
    with torch.no_grad():
        c, u = model(x, t, labels), model(x, t, torch.tensor([3, 3]))
        assert torch.equal(guided(model, x, t, labels, 1.0), c)
        twice = guided(model, x, t, labels, 2.0)
        none = guided(model, x, t, labels, 0.0)
    assert (c - u).abs().max() > 1e-3
    torch.testing.assert_close(twice[:, :3], u[:, :3] + 2 * (c[:, :3] - u[:, :3]), rtol=0, atol=1e-12)
    torch.testing.assert_close(twice[:, 3:], c[:, 3:], rtol=0, atol=1e-12)
    torch.testing.assert_close(none[:, :3], u[:, :3], rtol=0, atol=1e-12)


def test_scale_1_is_one_pass(model):
    calls = []
    hook = model.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    guided(model, start(3), torch.tensor([5, 900]), torch.tensor([0, 2]), 1.0)
    guided(model, start(3), torch.tensor([5, 900]), torch.tensor([0, 2]), 3.0)
    hook.remove()
    assert calls == [2, 4]


def test_guidance_needs_a_null_label():
    plain = DiT(DiTConfig(image_size=4, channels=3, dim=8, n_layers=1, n_heads=2, label_dropout=0.0)).double()
    with pytest.raises(ValueError, match="no null label"):
        guided(plain, start(), torch.tensor([1, 1]), torch.tensor([0, 1]), 2.0)


@pytest.mark.parametrize("config", [SamplingConfig(steps=4), SamplingConfig("ddpm", steps=3), SamplingConfig(eta=0.5)])
def test_sampling_is_repeatable_and_leaves_the_mode_alone(model, config):
    labels = torch.tensor([0, 1, 2])
    model.train()
    state = torch.get_rng_state()
    one, again = (sample(model, PROCESS, labels, config, seed=7) for _ in range(2))
    assert torch.equal(one, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one, sample(model, PROCESS, labels, config, seed=8))
    assert one.shape == (3, 3, 4, 4)
    assert one.isfinite().all()
    assert model.training
    model.eval()


def test_ddim_of_a_model_that_predicts_nothing():
    """Without predicted noise x_0 is x / sqrt(s), and each step scales x by sqrt(s' / s): at the end x / sqrt(s_T)."""
    blank = DiT(DiTConfig(image_size=4, channels=3, dim=8, n_layers=1, n_heads=2)).double()
    initialize(blank, seed=0)
    images = sample(blank, PROCESS, torch.tensor([0, 1]), SamplingConfig(steps=10, clip=False, guidance=1.0), seed=5)
    noise = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(5)).double()
    torch.testing.assert_close(images, noise / PROCESS.signal[-1].sqrt(), rtol=1e-9, atol=0)


def test_too_many_steps(model):
    with pytest.raises(ValueError, match="from 1 to 1000 steps, got 2000"):
        sample(model, PROCESS, torch.tensor([0]), SamplingConfig(steps=2000))


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sampler": "dim"}, "did you mean 'ddim'"),
        ({"eta": 1.5}, r"sampling.eta must be in \[0, 1\]"),
        ({"sampler": "ddpm", "eta": 0.5}, "eta is for ddim"),
        ({"steps": 2.5}, "steps must be of type int"),
    ],
)
def test_wrong_settings(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**values)
