"""Diffusion: predict the noise in an image, and draw images of a class.

Shape suffixes: B batch, N images, C channels, H height, W width.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normstream.data.diffusion_config import DiffusionDataConfig
from normstream.data.diffusion_images import load_diffusion_images
from normstream.data.images import ImageBatch, ImageData
from normstream.diffusion.features import features_of, load_feature_extractor, train_feature_extractor
from normstream.diffusion.fid import frechet_distance
from normstream.diffusion.pictures import save_grid
from normstream.diffusion.process import Process, variational_bound
from normstream.diffusion.sampling import sample
from normstream.models.dit import DiT, DiTConfig
from normstream.models.evaluating import evaluating
from normstream.optim import OptimizerConfig, ScheduleConfig
from normstream.tasks.language_modeling import precise
from normstream.tasks.losses import autocast
from normstream.tasks.task import Artifact, Losses, Metric, Task, TaskName

SAMPLE_BATCH = 128
"""Images that are drawn at a time."""
JUDGE_SEED = 1
"""Of the noise that judged samples start from."""


class Diffusion(Task):
    """Mean squared error of the noise that a ``DiT`` predicts; with learned sigma also the variational bound.

    The loss of training is ``mean |e - e'|^2 + (T / 1000) bound``, the loss that is reported the first part: the bound
    teaches the variance only (``normstream.diffusion.variational_bound``). Timesteps are uniform over all T.

    Evaluations give every image the same noise each time, and timesteps spread evenly over the images.
    """

    name: ClassVar[TaskName] = "diffusion"
    title: ClassVar[str] = "diffusion"
    unit: ClassVar[str] = "images"
    loss_title: ClassVar[str] = "noise MSE"
    loss_unit: ClassVar[str] = ""
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("fid", "FID (own classifier)", higher_is_better=False),
        Metric("class_accuracy", "class accuracy of samples (%)", higher_is_better=True),
    )
    artifacts: ClassVar[tuple[Artifact, ...]] = (Artifact("samples.png", "Samples, a row for each class"),)
    baseline: ClassVar[str] = "the noise's variance"
    model_config: ClassVar[type[Any]] = DiTConfig
    data_config: ClassVar[type[Any]] = DiffusionDataConfig
    lrs: ClassVar[tuple[float, ...]] = (2e-3, 8e-3)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {
            "model": DiTConfig(image_size=16, channels=3, n_classes=6, dim=64, n_layers=4, n_heads=4),
            "optimizer": OptimizerConfig(lr=8e-3, weight_decay=0.0),
            "schedule": ScheduleConfig(kind="cosine", warmup=50),
            "steps": 1200,
            "batch_size": 32,
            "ema": 0.99,
            "eval_every": 200,
            "stats_every": 200,
            "checkpoint_every": 600,
        }

    def __init__(self, config: Any, data: ImageData) -> None:
        super().__init__(config, data)
        self.process = Process.of(config.data.schedule, config.model.n_timesteps)

    @classmethod
    def check(cls, config: Any) -> None:
        sampling = config.data.sampling
        if sampling.steps > config.model.n_timesteps:
            raise ValueError(
                f"data.sampling.steps {sampling.steps} is above model.n_timesteps {config.model.n_timesteps}; "
                "change one"
            )
        if sampling.guidance != 1 and config.model.label_dropout == 0:
            raise ValueError(
                f"data.sampling.guidance {sampling.guidance} needs a null label, but model.label_dropout is 0; set "
                "guidance to 1 or label_dropout above 0"
            )
        for name in ("z_loss", "label_smoothing"):
            if getattr(config, name) > 0:
                raise ValueError(f"{name} is about predicted classes, but diffusion predicts noise; leave it at 0")

    @classmethod
    def load(cls, config: DiffusionDataConfig) -> ImageData:
        return load_diffusion_images(config)

    @classmethod
    def resolve(cls, model: DiTConfig, data: ImageData) -> DiTConfig:
        return replace(model, image_size=data.image_size, channels=data.channels, n_classes=len(data.classes))

    @classmethod
    def tokens_per_sample(cls, config: Any, data: Any) -> float:
        return config.model.n_patches

    def losses(self, model: DiT, batch: ImageBatch, n_targets: int, share: float) -> Losses:
        clean = to_model(batch.images_BCHW)
        step_B = torch.randint(len(self.process), (len(clean),), device=clean.device)
        noise = torch.randn_like(clean)
        noisy = self.process.noised(clean, step_B, noise)
        output, aux = model.output_and_aux(noisy, step_B, batch.labels_B)
        output = precise(output)
        main = squared_errors(output, noise).sum() / n_targets
        if not self.config.model.learned_sigma:
            return Losses(main, main, {}, aux)
        bound_B = variational_bound(self.process, clean, noisy, step_B, output)
        bound = len(self.process) / 1000 * bound_B.sum() / n_targets
        return Losses(main + bound, main, {"variational_bound": bound}, aux)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        n_images, n_steps = sum(batch.n_targets for batch in self.eval_batches), len(self.process)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(n_images, generator=generator)  # neighbours in the data get unlike timesteps
        steps_N = ((order + torch.rand(n_images, generator=generator)) / n_images * n_steps).long()
        total, first = 0.0, 0
        with evaluating(model), autocast(self.config.precision, device):
            for batch in self.eval_batches:
                clean = to_model(batch.images_BCHW)
                noise = torch.randn(clean.shape, generator=generator)
                step_B = steps_N[first : first + len(clean)].clamp(max=n_steps - 1)
                noisy = self.process.noised(clean, step_B, noise)
                output = model(noisy.to(device), step_B.to(device), batch.labels_B.to(device))
                total += squared_errors(precise(output).cpu(), noise).sum().item()
                first += len(clean)
        return {"loss": total / n_images}

    def judge(self, model: nn.Module, folder: Path) -> dict[str, float]:
        """Draws samples, writes ``samples.png``, and compares their features with those of training images."""
        settings, n_classes = self.config.data, len(self.data.classes)
        per_class = -(-settings.samples // n_classes)
        labels_N = torch.arange(max(per_class, settings.shown) * n_classes) % n_classes
        images_NCHW = draw(model, self.process, labels_N, settings.sampling, JUDGE_SEED)
        shown = images_NCHW[: settings.shown * n_classes]
        save_grid(shown.unflatten(0, (-1, n_classes)).transpose(0, 1), folder / "samples.png")
        path = settings.feature_extractor
        extractor = train_feature_extractor(self.data, folder) if path is None else load_feature_extractor(path)
        drawn = features_of(extractor, images_NCHW)
        real = features_of(extractor, self._training_images())
        scores = {"fid": frechet_distance(drawn.features_NF, real.features_NF)}
        if drawn.logits_NV.shape[1] == n_classes:
            right = drawn.logits_NV.argmax(1) == labels_N
            scores["class_accuracy"] = 100 * right.double().mean().item()
        return scores

    def _training_images(self, most: int = 4096) -> Tensor:
        """Training images in [0, 1], drawn with a fixed seed: every second shape would be of three classes only."""
        order = torch.randperm(len(self.data.train), generator=torch.Generator().manual_seed(0))
        return self.data.train.batch(order[:most].numpy()).images_BCHW

    def uniform_loss(self) -> float:
        return 1.0

    def baseline_loss(self) -> float:
        return 1.0


def to_model(images: Tensor) -> Tensor:
    """From [0, 1] to [-1, 1].

    >>> to_model(torch.tensor([0.0, 1.0]))
    tensor([-1.,  1.])
    """
    return 2 * images - 1


def squared_errors(output: Tensor, noise: Tensor) -> Tensor:
    """The mean squared error of each sample's noise, (B,); channels behind those of the noise are left out.

    >>> squared_errors(torch.ones(1, 2, 1, 1), torch.zeros(1, 1, 1, 1))
    tensor([1.])
    """
    return F.mse_loss(output[:, : noise.shape[1]], noise, reduction="none").flatten(1).mean(1)


def draw(model: Any, process: Process, labels_N: Tensor, sampling: Any, seed: int) -> Tensor:
    """Images of these classes in [0, 1] on the CPU, (N, C, H, W), a batch at a time."""
    parts = [
        sample(model, process, labels_B, sampling, seed=seed + 1000 * number).float().cpu()
        for number, labels_B in enumerate(labels_N.split(SAMPLE_BATCH))
    ]
    return ((torch.cat(parts) + 1) / 2).clamp(0, 1)
