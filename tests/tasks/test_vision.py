"""The task vision: its losses by hand, its scores, teachers, and a run that learns."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normstream import initialize, placements
from normstream.data import Loader
from normstream.data.image_config import AugmentationConfig
from normstream.data.images import ImageBatch, ImageData, ImageDataConfig, Images, load_images
from normstream.models import ViT, ViTConfig
from normstream.optim import OptimizerConfig, ScheduleConfig
from normstream.tasks import get_task
from normstream.tasks.augmentation import augment
from normstream.tasks.vision import Vision, image_scores, load_teacher
from normstream.training import TrainConfig, load_model, train
from normstream.training.config import resolve
from normstream.training.step import Updater

SMALL = ViTConfig(placement="pre", patch_size=4, dim=16, n_layers=2, n_heads=2)


@pytest.fixture(scope="module")
def data() -> ImageData:
    return load_images(ImageDataConfig())


def config_of(model: ViTConfig = SMALL, **options: Any) -> TrainConfig:
    return TrainConfig(**({"task": "vision", "model": model, "batch_size": 8, "eval_batches": 3} | options))


def task_of(images: ImageData, **options: Any) -> tuple[Vision, ViT]:
    data = replace(images, config=options.get("data", images.config))
    config = resolve(config_of(**options), data)
    model = ViT(config.model)  # pyright: ignore[reportArgumentType]
    initialize(model, seed=0)
    return Vision(config, data), model


def test_registered_with_its_defaults():
    assert get_task("vision").title == "image classification"
    config = TrainConfig(task="vision", **Vision.defaults())
    assert isinstance(config.model, ViTConfig)
    assert config.data == ImageDataConfig()
    assert config.data.augmentation == AugmentationConfig(), "digits are not flipped"


def test_data_decides_size_classes_and_normalization(data: ImageData):
    model = resolve(config_of(), data).model
    assert isinstance(model, ViTConfig)
    assert (model.image_size, model.channels, model.n_classes) == (8, 1, 10)
    assert (model.pixel_mean, model.pixel_std) == data.statistics
    own = resolve(config_of(replace(SMALL, pixel_mean=(0.5,), pixel_std=(0.25,))), data).model
    assert isinstance(own, ViTConfig)
    assert (own.pixel_mean, own.pixel_std) == ((0.5,), (0.25,))
    with pytest.raises(ValueError, match="image_size 8 is not divisible by patch_size 3"):
        resolve(config_of(replace(SMALL, image_size=9, patch_size=3)), data)


def test_tokens_of_an_image(data: ImageData):
    for changes, tokens in (({}, 5), ({"distillation": True}, 6), ({"pool": "mean"}, 4), ({"patch_size": 2}, 17)):
        config = resolve(config_of(replace(SMALL, **changes)), data)
        assert Vision.tokens_per_sample(config, data) == tokens


def test_loss_is_the_mean_cross_entropy(data: ImageData):
    task, model = task_of(data)
    batch = data.train.batch(range(8))
    losses = task.losses(model, batch, 8, 1.0)
    wanted = F.cross_entropy(model(batch.pixels_BCHW / 255), batch.labels_B)
    torch.testing.assert_close(losses.main, wanted)
    assert losses.loss is losses.main
    assert losses.parts == {}
    halves = [task.losses(model, half, 8, 0.5).main for half in batch.split(2)]
    torch.testing.assert_close(sum(halves), wanted)


def test_mixed_targets_smoothing_and_z_loss(data: ImageData):
    """Against one cross-entropy with the target distributions written out."""
    augmentation = AugmentationConfig(mixup=0.8)
    given = ImageDataConfig(augmentation=augmentation)
    task, model = task_of(data, data=given, label_smoothing=0.1, z_loss=0.01)
    batch = data.train.batch(range(8))
    torch.manual_seed(7)
    losses = task.losses(model, batch, 8, 1.0)
    torch.manual_seed(7)
    mixed = augment(batch.images_BCHW, batch.labels_B, augmentation)
    assert 0.02 < mixed.weight < 0.98
    one_hot = F.one_hot(batch.labels_B, 10).float()
    target = mixed.weight * one_hot + (1 - mixed.weight) * one_hot.flip(0)
    logits = model(mixed.images_BCHW)
    torch.testing.assert_close(losses.main, F.cross_entropy(logits, target))
    smoothed = F.cross_entropy(logits, 0.9 * target + 0.1 / 10)
    z_loss = 0.01 * logits.logsumexp(1).square().mean()
    torch.testing.assert_close(losses.parts["label_smoothing"], smoothed - losses.main)
    torch.testing.assert_close(losses.parts["z_loss"], z_loss)
    torch.testing.assert_close(losses.loss, smoothed + z_loss)


def test_distillation_without_a_teacher(data: ImageData):
    task, model = task_of(data, model=replace(SMALL, distillation=True), label_smoothing=0.2)
    batch = data.train.batch(range(8))
    losses = task.losses(model, batch, 8, 1.0)
    heads = model(batch.images_BCHW)
    assert len(heads) == 2
    wanted = [[F.cross_entropy(h, batch.labels_B, label_smoothing=s) for h in heads] for s in (0.0, 0.2)]
    torch.testing.assert_close(losses.main, sum(wanted[0]) / 2)
    torch.testing.assert_close(losses.loss, sum(wanted[1]) / 2)


@pytest.fixture(scope="module")
def teacher(data: ImageData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train(config_of(steps=3, eval_every=3), folder, data=data)
    return folder


def test_hard_distillation(data: ImageData, teacher: Path):
    """DeiT's equation 3: half the loss of the labels, smoothed, and half that of the teacher's choice, not smoothed."""
    given = ImageDataConfig(teacher=teacher, augmentation=AugmentationConfig(cutmix=1.0))
    task, model = task_of(data, data=given, model=replace(SMALL, distillation=True), label_smoothing=0.1)
    batch = data.train.batch(range(8))
    torch.manual_seed(1)
    losses = task.losses(model, batch, 8, 1.0)
    losses.loss.backward()
    torch.manual_seed(1)
    mixed = augment(batch.images_BCHW, batch.labels_B, given.augmentation)
    assert 0 < mixed.weight < 1
    logits, distilled = model(mixed.images_BCHW)
    one_hot = F.one_hot(batch.labels_B, 10).float()
    target = mixed.weight * one_hot + (1 - mixed.weight) * one_hot.flip(0)
    choice = load_model(teacher)(mixed.images_BCHW).argmax(1)
    assert not torch.equal(choice, batch.labels_B)
    taught = F.cross_entropy(distilled, choice)
    torch.testing.assert_close(losses.main, (F.cross_entropy(logits, target) + taught) / 2)
    torch.testing.assert_close(losses.loss, (F.cross_entropy(logits, 0.9 * target + 0.01) + taught) / 2)
    assert task.teacher is not None
    assert all(p.grad is None and not p.requires_grad for p in task.teacher.parameters())


def test_teachers_that_do_not_fit(data: ImageData, teacher: Path):
    with pytest.raises(
        ValueError, match=r"image_size, channels, n_classes \[8, 1, 10\], where the student has \[16, 1"
    ):
        load_teacher(teacher, replace(SMALL, image_size=16))
    with pytest.raises(
        ValueError, match=r"data\.teacher teaches a distillation head, but model\.distillation is false"
    ):
        config_of(data=ImageDataConfig(teacher=teacher))
    with pytest.raises(ValueError, match="no checkpoint in"):
        load_teacher(teacher / "nowhere", SMALL)


def test_mixing_needs_two_images():
    given = ImageDataConfig(augmentation=AugmentationConfig(mixup=0.8))
    assert config_of(data=given, grad_accumulation=4).grad_accumulation == 4
    with pytest.raises(ValueError, match="mix images of one micro-batch, but that has 1; raise batch_size"):
        config_of(data=given, grad_accumulation=8)


class Fixed(torch.nn.Module):
    """Gives logits in the order in which they are asked for."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits, self.at = torch.nn.Parameter(logits), 0

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        self.at += len(images)
        return self.logits[self.at - len(images) : self.at]


@pytest.mark.parametrize("classes", [10, 12])
def test_scores_by_brute_force(classes: int):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, classes, generator=generator)
    labels = torch.randint(classes, (50,), generator=generator)
    batches = [ImageBatch(torch.zeros(len(part), 1, 2, 2, dtype=torch.uint8), part) for part in labels.split(20)]
    model = Fixed(logits).train()
    scores = image_scores(model, batches)
    order = logits.argsort(1, descending=True).tolist()
    places = [row.index(label) for row, label in zip(order, labels.tolist(), strict=True)]
    assert scores["accuracy"] == pytest.approx(100 * sum(place == 0 for place in places) / 50)
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert ("top5_accuracy" in scores) == (classes > 10)
    if classes > 10:
        assert scores["top5_accuracy"] == pytest.approx(100 * sum(place < 5 for place in places) / 50)
    assert model.training


def test_evaluation_and_judgement(data: ImageData, tmp_path: Path):
    task, model = task_of(data)
    model.train()
    first = task.evaluate(model)
    assert task.evaluate(model) == first, "nothing is drawn"
    n = len(data.validation)
    numbers = [i * n // 24 for i in range(24)]
    batch = data.validation.batch(numbers)
    logits = model.eval()(batch.images_BCHW)
    assert first["loss"] == pytest.approx(F.cross_entropy(logits, batch.labels_B).item(), rel=1e-5)
    whole = data.validation.batch(range(n))
    right = (model(whole.images_BCHW).argmax(1) == whole.labels_B).sum().item()
    assert task.judge(model, tmp_path) == {"accuracy": pytest.approx(100 * right / n)}


def test_baselines(data: ImageData):
    skewed = replace(data, train=Images(data.train.pixels[:4], np.array([0, 0, 0, 1])))
    task, _ = task_of(skewed)
    assert task.uniform_loss() == pytest.approx(math.log(10))
    counts = np.array([4, 2] + [1] * 8) / 14
    labels = torch.cat([batch.labels_B for batch in task.eval_batches])
    assert task.baseline_loss() == pytest.approx(-np.log(counts)[labels.numpy()].mean())


@pytest.mark.parametrize("name", placements.names())
def test_every_placement_does_an_update(name: str, data: ImageData):
    given = ImageDataConfig(augmentation=AugmentationConfig(mixup=0.8, cutmix=1.0))
    options: dict[str, Any] = {"model": replace(SMALL, placement=name, drop_path=0.1), "data": given}
    task, model = task_of(data, optimizer=OptimizerConfig(lr=1e-3), **options)
    before = [p.clone() for p in model.parameters()]
    updater = Updater(model.train(), task.config, task)
    update = updater(1, Loader(data.train, 8, seed=0).batch(0))
    assert update.applied
    assert 0 < update.grad_norm < 1e3
    assert update.loss < 2 * math.log(10) + 2
    assert any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_a_run_learns_and_its_checkpoint_scores_the_same(data: ImageData, tmp_path: Path):
    config = config_of(
        ViTConfig(placement="siamese", patch_size=2, dim=32, n_layers=2, n_heads=4),
        batch_size=32,
        steps=100,
        eval_every=50,
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig("cosine", warmup=10),
    )
    result = train(config, tmp_path / "run", data=data)
    assert result.metrics["accuracy"] > 80
    assert not result.diverged
    assert not result.collapsed
    model = load_model(tmp_path / "run")
    assert (model.config.pixel_mean, model.config.pixel_std) == data.statistics
    whole = data.validation.batch(range(len(data.validation)))
    right = (model(whole.images_BCHW).argmax(1) == whole.labels_B).float().mean().item()
    assert 100 * right == pytest.approx(result.metrics["accuracy"], abs=1e-3)
