"""Features of images, in which samples are judged: those of a small classifier of ours, or of a trained ViT.

Shape suffixes: B, N images, C channels, H height, W width, F features, V classes.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE = "feature_extractor.safetensors"
WIDTH = 32
"""Features of the small classifier."""
STEPS, BATCH, RATE = 500, 128, 1e-2
"""Updates of the small classifier, images of each, and its largest learning rate."""


class Features(NamedTuple):
    """What a classifier says of images."""

    features_NF: Tensor
    """What its last linear map reads."""
    logits_NV: Tensor
    """Of the classes."""


class SmallClassifier(nn.Module):
    """Three convolutions, the mean of each channel, a linear map: to judge samples of small images with.

    Shape: images ``(B, C, H, W)`` in [0, 1], of any size from 4 on, to features ``(B, 32)`` and logits ``(B, V)``.

    >>> SmallClassifier(channels=3, n_classes=6)(torch.zeros(2, 3, 16, 16)).features_NF.shape
    torch.Size([2, 32])
    """

    def __init__(self, channels: int, n_classes: int) -> None:
        super().__init__()
        self.channels, self.n_classes = channels, n_classes
        widths = (channels, WIDTH // 2, WIDTH, WIDTH)
        self.convolutions = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(widths))
        self.head = nn.Linear(WIDTH, n_classes)

    def forward(self, images_BCHW: Float[Tensor, "B C H W"]) -> Features:
        x = images_BCHW - 0.5
        for index, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(F.max_pool2d(x, 2) if index else x))
        features = x.mean((2, 3))
        return Features(features, self.head(features))


class ViTFeatures(nn.Module):
    """The features of a ViT: what its head reads of the final hidden vectors.

    >>> from normstream.models import ViT, ViTConfig
    >>> ViTFeatures(ViT(ViTConfig(dim=16, n_layers=1)))(torch.zeros(2, 1, 8, 8)).features_NF.shape
    torch.Size([2, 16])
    """

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit.eval()
        self.channels, self.n_classes = vit.config.channels, vit.config.n_classes

    def forward(self, images_BCHW: Float[Tensor, "B C H W"]) -> Features:
        hidden_BTD = self.vit.hidden(images_BCHW)
        features = hidden_BTD.mean(1) if self.vit.config.pool == "mean" else hidden_BTD[:, 0]
        return Features(features, self.vit.head_logits(hidden_BTD)[0])


def train_feature_extractor(data: Any, folder: Path | None = None, *, seed: int = 0) -> SmallClassifier:
    """A small classifier, trained on the training split: 300 updates of 128 images, a few seconds on one core.

    Args:
        data: an ``ImageData``.
        folder: where it is kept; if it is there already, with as many channels and classes, it is read.
        seed: of the start and of the order of the images.

    >>> from normstream.data.diffusion_images import DiffusionDataConfig, load_diffusion_images
    >>> data = load_diffusion_images(DiffusionDataConfig(max_images=64, image_size=8))
    >>> train_feature_extractor(data).n_classes
    6
    """
    if folder is not None and (folder / FILE).is_file():
        known = load_small_classifier(folder / FILE)
        if (known.channels, known.n_classes) == (data.channels, len(data.classes)):
            return known
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallClassifier(data.channels, len(data.classes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
        for _ in range(STEPS):
            numbers = torch.randint(len(data.train), (min(BATCH, len(data.train)),))
            batch = data.train.batch(numbers.numpy())
            loss = F.cross_entropy(model(batch.images_BCHW).logits_NV, batch.labels_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(model.state_dict()), folder / FILE)
    return model.eval()


def load_small_classifier(file: Path) -> SmallClassifier:
    """What ``train_feature_extractor`` wrote; ValueError if it is something else."""
    try:
        tensors = load_file(file)
        model = SmallClassifier(tensors["convolutions.0.weight"].shape[1], len(tensors["head.bias"]))
        model.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{file} is no classifier that train_feature_extractor wrote: {error}") from None
    return model.eval()


def load_feature_extractor(path: Path) -> SmallClassifier | ViTFeatures:
    """The classifier in a folder: of ``train_feature_extractor``, or of a run of the task vision.

    Raises:
        ValueError: if there is neither.
    """
    from normstream.training.checkpoint import load_model  # training imports the tasks, which import this

    if (path / FILE).is_file():
        return load_small_classifier(path / FILE)
    model = load_model(path)
    if not hasattr(model, "head_logits"):
        raise ValueError(f"{path} holds a {type(model).__name__}; features are those of a classifier, a run of vision")
    return ViTFeatures(model)


@torch.no_grad()
def features_of(extractor: nn.Module, images_NCHW: Tensor, batch_size: int = 256) -> Features:
    """Features and logits of many images in [0, 1], on the device of the classifier.

    Raises:
        ValueError: for images of other channels than the classifier's.

    >>> features_of(SmallClassifier(1, 2), torch.zeros(3, 1, 8, 8)).logits_NV.shape
    torch.Size([3, 2])
    """
    if images_NCHW.shape[1] != extractor.channels:
        raise ValueError(
            f"the feature extractor takes images of {extractor.channels} channels, got {images_NCHW.shape[1]}; "
            "give one that was trained on such images, or none"
        )
    device = next(extractor.parameters()).device
    parts = [extractor(images.to(device)) for images in images_NCHW.float().split(batch_size)]
    return Features(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))
