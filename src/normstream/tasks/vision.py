"""Image classification: which of some classes an image shows.

Shape suffixes: B images, V classes.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from normstream.data.image_config import ImageDataConfig
from normstream.data.images import ImageBatch, ImageData, load_images
from normstream.models import ViT, ViTConfig
from normstream.models.evaluating import evaluating
from normstream.optim import OptimizerConfig, ScheduleConfig
from normstream.tasks.augmentation import Mixed, augment
from normstream.tasks.baseline import token_counts, unigram_loss
from normstream.tasks.language_modeling import precise
from normstream.tasks.losses import Precision, autocast, loss_sum, z_loss_sum
from normstream.tasks.task import Losses, Metric, Task, TaskName, spread


class Vision(Task):
    """Mean cross-entropy of the classes of augmented images, of a ``ViT``; then the share that it gets right.

    Mixed images have both labels, weighted. With ``model.distillation`` the loss is the mean of that of both heads:
    the second one learns what ``data.teacher`` makes of the augmented images (hard distillation, DeiT's equation 3),
    or without a teacher the labels too. The loss that is reported is the plain cross-entropy; what label smoothing
    adds to it is the part ``label_smoothing``.

    Evaluations take ``eval_batches`` batches; the last word is over the whole validation split.
    """

    name: ClassVar[TaskName] = "vision"
    title: ClassVar[str] = "image classification"
    unit: ClassVar[str] = "images"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "accuracy (%)", higher_is_better=True),
        Metric("top5_accuracy", "top-5 accuracy (%)", higher_is_better=True),
    )
    baseline: ClassVar[str] = "how frequent each class is"
    model_config: ClassVar[type[Any]] = ViTConfig
    data_config: ClassVar[type[Any]] = ImageDataConfig
    lrs: ClassVar[tuple[float, ...]] = (1e-3, 4e-3)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {
            "model": ViTConfig(image_size=8, patch_size=2, dim=64, n_layers=6, n_heads=4),
            "optimizer": OptimizerConfig(lr=2e-3),
            "schedule": ScheduleConfig("cosine", warmup=50),
            "steps": 600,
            "batch_size": 64,
            "eval_every": 50,
            "stats_every": 50,
            "checkpoint_every": 300,
        }

    def __init__(self, config: Any, data: ImageData) -> None:
        super().__init__(config, data)
        self.teacher = None if config.data.teacher is None else load_teacher(config.data.teacher, config.model)

    @classmethod
    def check(cls, config: Any) -> None:
        if config.data.teacher is not None and not config.model.distillation:
            raise ValueError(
                "data.teacher teaches a distillation head, but model.distillation is false; set it to true"
            )
        images = config.batch_size // config.grad_accumulation
        if config.data.augmentation.mixes and images < 2:
            raise ValueError(
                f"mixup and cutmix mix images of one micro-batch, but that has {images}; raise batch_size or lower "
                "grad_accumulation"
            )

    @classmethod
    def load(cls, config: ImageDataConfig) -> ImageData:
        return load_images(config)

    @classmethod
    def resolve(cls, model: ViTConfig, data: ImageData) -> ViTConfig:
        mean, std = data.statistics
        return replace(
            model,
            image_size=data.image_size,
            channels=data.channels,
            n_classes=len(data.classes),
            pixel_mean=model.pixel_mean or mean,
            pixel_std=model.pixel_std or std,
        )

    @classmethod
    def tokens_per_sample(cls, config: Any, data: Any) -> float:
        return config.model.n_patches + config.model.n_tokens

    def losses(self, model: ViT, batch: ImageBatch, n_targets: int, share: float) -> Losses:
        mixed = augment(batch.images_BCHW, batch.labels_B, self.config.data.augmentation)
        hidden_BTD, aux = model.hidden_and_aux(mixed.images_BCHW)
        logits = [precise(logits_BV) for logits_BV in model.head_logits(hidden_BTD)]
        targets, smoothing = [mixed] * len(logits), [self.config.label_smoothing] * len(logits)
        if self.teacher is not None:
            targets[1], smoothing[1] = self._taught(mixed), 0.0
        count = n_targets * len(logits)
        main = loss = sum_of(map(mixed_loss_sum, logits, targets)) / count
        parts: dict[str, Tensor] = {}
        if self.config.label_smoothing > 0:
            loss = sum_of(map(mixed_loss_sum, logits, targets, smoothing)) / count
            parts["label_smoothing"] = loss - main
        if self.config.z_loss > 0:
            z_losses = (z_loss_sum(logits_BV, mixed.labels_B) for logits_BV in logits)
            parts["z_loss"] = self.config.z_loss * sum_of(z_losses) / count
            loss = loss + parts["z_loss"]
        return Losses(loss, main, parts, aux)

    @torch.no_grad()
    def _taught(self, mixed: Mixed) -> Mixed:
        """The teacher's choice in place of the labels."""
        assert self.teacher is not None
        choice_B = self.teacher.to(mixed.images_BCHW.device)(mixed.images_BCHW).argmax(-1)
        return Mixed(mixed.images_BCHW, choice_B, choice_B, 1.0)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return image_scores(model, self.eval_batches, self.config.precision)

    def judge(self, model: nn.Module, folder: Path) -> dict[str, float]:
        """Accuracies over the whole validation split."""
        batches = spread(self.data.validation, self.config.batch_size, None)
        scores = image_scores(model, batches, self.config.precision)
        return {name: value for name, value in scores.items() if name != "loss"}

    def uniform_loss(self) -> float:
        return math.log(len(self.data.classes))

    def baseline_loss(self) -> float:
        targets = np.concatenate([batch.labels_B.numpy() for batch in self.eval_batches])
        return unigram_loss(token_counts(self.data.train.labels, len(self.data.classes)), targets)


def sum_of(losses: Iterable[Tensor]) -> Tensor:
    """The sum of some numbers that are tensors."""
    return torch.stack(list(losses)).sum()


def mixed_loss_sum(logits_BV: Tensor, mixed: Mixed, label_smoothing: float = 0.0) -> Tensor:
    """The sum over mixed images of ``w loss(label) + (1 - w) loss(other label)``, the loss of the mixed target.

    >>> mixed = Mixed(torch.zeros(1, 1, 2, 2), torch.tensor([0]), torch.tensor([1]), 0.25)
    >>> mixed_loss_sum(torch.zeros(1, 2), mixed)
    tensor(0.6931)
    """
    loss = loss_sum(logits_BV, mixed.labels_B, label_smoothing)
    if mixed.weight == 1:
        return loss
    return mixed.weight * loss + (1 - mixed.weight) * loss_sum(logits_BV, mixed.others_B, label_smoothing)


@torch.no_grad()
def image_scores(model: nn.Module, batches: Iterable[ImageBatch], precision: Precision = "fp32") -> dict[str, float]:
    """Mean cross-entropy, accuracy and, above 10 classes, top-5 accuracy (%), in evaluation mode, restored after.

    >>> model = ViT(ViTConfig(image_size=4, dim=8, n_layers=1, n_heads=2, n_classes=2))
    >>> batch = ImageBatch(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    >>> image_scores(model, [batch])["accuracy"]
    50.0
    """
    device = next(model.parameters()).device
    losses, ranks = [], []
    with evaluating(model), autocast(precision, device):
        for batch in (batch.to(device) for batch in batches):
            logits_BV, labels_B = precise(model(batch.images_BCHW)), batch.labels_B
            losses.append(loss_sum(logits_BV, labels_B))
            ranks.append((logits_BV > logits_BV.gather(1, labels_B[:, None])).sum(1))
    rank = torch.cat(ranks).cpu()
    scores = {"loss": sum_of(losses).double().item() / len(rank), "accuracy": 100 * (rank == 0).double().mean().item()}
    if logits_BV.shape[1] > 10:
        scores["top5_accuracy"] = 100 * (rank < 5).double().mean().item()
    return scores


def load_teacher(path: Path, student: ViTConfig) -> nn.Module:
    """The model of a run folder or checkpoint, in evaluation mode, if it knows the student's images and classes.

    Raises ValueError if it does not, or if there is no checkpoint.
    """
    from normstream.training.checkpoint import load_model  # training depends on tasks

    teacher: Any = load_model(path)
    fields = ("image_size", "channels", "n_classes")
    theirs, ours = ([getattr(config, name, None) for name in fields] for config in (teacher.config, student))
    if not isinstance(teacher, ViT) or theirs != ours:
        raise ValueError(
            f"teacher {path} is a {type(teacher).__name__} with {', '.join(fields)} {theirs}, where the student has "
            f"{ours}; give a vision Transformer trained on the same images"
        )
    return teacher.requires_grad_(False)
