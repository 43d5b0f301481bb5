"""The diffusion task: its loss, its evaluation, its judgement, a run from end to end, and the command."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import normstream
from normstream.cli import main
from normstream.data.diffusion_config import DiffusionDataConfig
from normstream.diffusion.sampling import SamplingConfig
from normstream.models import DiT, DiTConfig
from normstream.tasks import get_task
from normstream.training import TrainConfig, load_model, train

CONFIG = TrainConfig(
    task="diffusion",
    model=DiTConfig(placement="siamese", image_size=8, channels=3, dim=16, n_layers=1, n_heads=2),
    data=DiffusionDataConfig(image_size=8, max_images=64, samples=12, shown=1, sampling=SamplingConfig(steps=2)),
    steps=2,
    batch_size=8,
    eval_every=1,
    eval_batches=2,
    ema=0.9,
    device="cpu",
)


def parts(config: TrainConfig = CONFIG) -> tuple[Any, Any, DiT]:
    """The task, its data and an initialized model."""
    kind = get_task("diffusion")
    data = kind.load(config.data)
    config = replace(config, model=kind.resolve(config.model, data))
    model = DiT(config.model)  # pyright: ignore[reportArgumentType]
    normstream.initialize(model, seed=0)
    return kind(config, data), data, model


def test_loss_at_the_start_is_the_mean_square_of_the_noise() -> None:
    """The model predicts 0 then, whatever the timestep."""
    task, data, model = parts()
    batch = data.train.batch(range(8))
    torch.manual_seed(3)
    losses = task.losses(model.eval(), batch, 8, 1.0)
    torch.manual_seed(3)
    torch.randint(1000, (8,))
    noise = torch.randn(8, 3, 8, 8)
    assert losses.main.item() == pytest.approx(noise.square().mean().item(), rel=1e-5)
    assert losses.loss.item() == pytest.approx(losses.main.item() + losses.parts["variational_bound"].item(), rel=1e-6)


def test_without_learned_sigma_there_is_no_bound() -> None:
    task, data, model = parts(replace(CONFIG, model=replace(CONFIG.model, learned_sigma=False)))
    losses = task.losses(model, data.train.batch(range(4)), 4, 1.0)
    assert losses.parts == {}
    assert model.config.output_channels == 3


def test_evaluation_repeats_and_does_not_touch_the_generator() -> None:
    task, _, model = parts()
    state = torch.get_rng_state()
    one, two = task.evaluate(model.train()), task.evaluate(model)
    assert one == two
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert 0.9 < one["loss"] < 1.1  # a model that predicts nothing
    assert task.uniform_loss() == 1.0


def test_a_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    result = train(CONFIG, run)
    assert set(result.metrics) == {"fid", "class_accuracy"}
    assert (run / "samples.png").read_bytes().startswith(b"\x89PNG")
    averaged, raw = load_model(run), load_model(run, ema=False)
    assert any(not torch.equal(a, b) for a, b in zip(averaged.parameters(), raw.parameters(), strict=True))
    out = tmp_path / "more.png"
    main(["sample", str(run), "--classes", "0,2", "--per-class", "1", "--steps", "2", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for wrong, said in (
        (["--out", str(out)], "exists already and is not overwritten"),
        (["--classes", "9", "--out", str(tmp_path / "no.png")], "classes must be numbers from 0 to 5"),
    ):
        with pytest.raises(SystemExit):
            main(["sample", str(run), *wrong])
        assert said in " ".join(capsys.readouterr().err.split())


def test_positions_are_counted_as_patches() -> None:
    task, data, _ = parts()
    assert task.tokens_per_sample(task.config, data) == 16  # 8 x 8 pixels in patches of 2 x 2


def test_guidance_needs_a_null_label() -> None:
    with pytest.raises(ValueError, match=r"needs a null label, but model\.label_dropout is 0"):
        replace(CONFIG, model=replace(CONFIG.model, label_dropout=0.0))
    with pytest.raises(ValueError, match=r"data\.sampling\.steps 2 is above model\.n_timesteps 1"):
        replace(CONFIG, model=replace(CONFIG.model, n_timesteps=1))
