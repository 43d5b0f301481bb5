"""The diffusion task: its loss, its evaluation, its judgement, a run from end to end, and the command."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import normstream
from normstream.cli import main
from normstream.data.diffusion_config import DiffusionDataConfig
from normstream.data.image_config import ImageDataConfig
from normstream.diffusion import variational_bound
from normstream.diffusion.sampling import SamplingConfig
from normstream.models import DiT, DiTConfig, ViTConfig
from normstream.tasks import get_task
from normstream.tasks.sample_command import Sample
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
UNGUIDED = replace(CONFIG.data, sampling=SamplingConfig(steps=2, guidance=1.0))  # pyright: ignore[reportArgumentType]


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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion") / "run"
    train(CONFIG, folder)
    return folder


def test_a_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(CONFIG, run := tmp_path / "run")
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
        (["--classes", "rng", "--out", str(tmp_path / "no.png")], "no class is called 'rng'; did you mean 'ring'?"),
        (["--per-class", "0", "--out", str(tmp_path / "no.png")], "per_class must be at least 1, got 0"),
        (["--out", str(tmp_path / "no.jpg")], "must end in .png"),
    ):
        with pytest.raises(SystemExit):
            main(["sample", str(run), *wrong])
        assert said in " ".join(capsys.readouterr().err.split())


def test_classes_of_a_picture_by_number_or_name(run: Path, tmp_path: Path) -> None:
    """A row for each class, a column for each image, enlarged 12 times with a gap of 2; the same for the same seed."""
    pictures = []
    for index, options in enumerate((["0", "2"], ["0,2"], ["circle", "triangle"], ["0", "2", "--seed", "1"])):
        out = tmp_path / f"{index}.png"
        main(["sample", str(run), "--per-class", "3", "--steps", "2", "--out", str(out), "--classes", *options])
        with Image.open(out) as picture:
            assert picture.size == (3 * (8 * 12 + 2), 2 * (8 * 12 + 2))
        pictures.append(out.read_bytes())
    assert pictures[0] == pictures[1] == pictures[2] != pictures[3]


def test_samples_are_of_a_diffusion_run(tmp_path: Path) -> None:
    config = TrainConfig(
        task="vision", model=ViTConfig(dim=8, n_layers=1, n_heads=2), data=ImageDataConfig(max_images=20), steps=1
    )
    train(config, tmp_path / "vision")
    with pytest.raises(ValueError, match="a model of the task vision, which normstream sample is not for"):
        Sample(tmp_path / "vision", out=tmp_path / "no.png")()


@pytest.mark.parametrize("learned", [False, True])
def test_the_loss_of_fixed_noise_by_its_definition(learned: bool) -> None:
    """Of a model that predicts something; a micro-batch of 10 of 20 images has half of the mean."""
    task, data, model = parts(
        replace(CONFIG, model=replace(CONFIG.model, learned_sigma=learned, label_dropout=0.0), data=UNGUIDED)
    )
    for i, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(i))
    batch = data.train.batch(range(10))
    torch.manual_seed(5)
    losses = task.losses(model.train(), batch, 20, 0.5)
    torch.manual_seed(5)
    t, noise = torch.randint(1000, (10,)), torch.randn(10, 3, 8, 8)
    clean, signal = 2 * batch.images_BCHW - 1, task.process.signal[t].float().view(-1, 1, 1, 1)
    noisy = signal.sqrt() * clean + (1 - signal).sqrt() * noise
    output = model(noisy, t, batch.labels_B)
    wanted = ((output[:, :3] - noise) ** 2).mean((1, 2, 3)).sum() / 20
    torch.testing.assert_close(losses.main, wanted, rtol=1e-4, atol=0)
    if learned:  # in bits per value, times T / 1000 = 1
        bound = variational_bound(task.process, clean, noisy, t, output).sum() / 20
        torch.testing.assert_close(losses.loss, wanted + bound, rtol=1e-4, atol=0)
    else:
        assert losses.loss is losses.main


class Told(torch.nn.Module):
    """Says what it is told to, and remembers the timesteps that it was asked about."""

    def __init__(self, answer: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.answer, self.timesteps = torch.nn.Parameter(torch.zeros(1)), answer, []

    def forward(self, images: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        self.timesteps.append(timesteps)
        return self.answer(images, timesteps)


def test_evaluation_of_predicting_nothing_and_everything() -> None:
    """The noise is what is left of the noisy image without the clean one; every stretch of timesteps has one image."""
    task, _, _ = parts(replace(CONFIG, eval_batches=8))
    clean = [2 * batch.images_BCHW - 1 for batch in task.eval_batches]
    nothing, known, signal = Told(lambda images, t: torch.zeros_like(images)), iter(clean), task.process.signal
    assert task.evaluate(nothing)["loss"] == pytest.approx(1, abs=0.05)  # the variance of 12,288 normal numbers
    times = torch.cat(nothing.timesteps)
    for i, time in enumerate(sorted(times.tolist())):
        assert i * 1000 // 64 <= time <= (i + 1) * 1000 / 64
    assert times.tolist() != sorted(times.tolist())

    def everything(images: Tensor, t: Tensor) -> Tensor:
        s = signal[t].view(-1, 1, 1, 1)
        return (images - s.sqrt() * next(known)) / (1 - s).sqrt()

    assert task.evaluate(Told(everything))["loss"] < 1e-6


def test_real_images_are_judged_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of samples: far nearer to the training images than noise is, and of the right class."""
    task, data, model = parts()

    def real(model: Any, process: Any, labels_N: Tensor, sampling: Any, seed: int) -> Tensor:
        return data.validation.batch([data.validation.labels.tolist().index(i) for i in labels_N.tolist()]).images_BCHW

    def noise(model: Any, process: Any, labels_N: Tensor, sampling: Any, seed: int) -> Tensor:
        return torch.rand(len(labels_N), 3, 8, 8, generator=torch.Generator().manual_seed(0))

    scores = {}
    for draw in (real, noise):
        monkeypatch.setattr("normstream.tasks.diffusion.draw", draw)
        scores[draw.__name__] = task.judge(model, tmp_path)
    assert scores["real"]["class_accuracy"] > scores["noise"]["class_accuracy"]
    assert scores["real"]["fid"] < scores["noise"]["fid"] / 2


def test_the_judge_sees_images_of_every_class() -> None:
    """Shapes come in turns of six: a stride of two through them would have three of the classes."""
    task, data, _ = parts()
    some = task._training_images(32)
    of_each = [data.train.batch([i for i in range(64) if data.train.labels[i] == k]).images_BCHW for k in range(6)]
    counts = [sum(bool((image == own).flatten(1).all(1).any()) for image in some) for own in of_each]
    assert sum(counts) == 32
    assert min(counts) >= 2


def test_positions_are_counted_as_patches() -> None:
    task, data, _ = parts()
    assert task.tokens_per_sample(task.config, data) == 16  # 8 x 8 pixels in patches of 2 x 2


def test_guidance_needs_a_null_label() -> None:
    with pytest.raises(ValueError, match=r"needs a null label, but model\.label_dropout is 0"):
        replace(CONFIG, model=replace(CONFIG.model, label_dropout=0.0))
    with pytest.raises(ValueError, match=r"data\.sampling\.steps 2 is above model\.n_timesteps 1"):
        replace(CONFIG, model=replace(CONFIG.model, n_timesteps=1))
