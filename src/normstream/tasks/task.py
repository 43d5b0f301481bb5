"""What a task is: data, a kind of model, a loss and measures of success, so that one loop trains all of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from normstream.data.batches import AnyBatch, Samples
from normstream.data.tokenizer import Tokenizer
from normstream.models import ModelConfig

TaskName = Literal["lm", "mlm", "translation", "vision", "diffusion", "classification"]


@dataclass(frozen=True)
class Metric:
    """A measure of success besides the loss.

    >>> Metric("accuracy", "accuracy (%)", higher_is_better=True).name
    'accuracy'
    """

    name: str
    """Key in rows of metrics and in results."""
    title: str
    """What tables and axes call it, unit included."""
    higher_is_better: bool


@dataclass(frozen=True)
class Artifact:
    """A file that ``Task.judge`` leaves in the run's folder, and that reports show.

    >>> Artifact("samples.png", "Samples").is_picture
    True
    """

    file: str
    """Name in the run's folder: a .png is shown as a picture, a .tsv as a table of its first lines."""
    title: str
    """Heading in reports."""

    @property
    def is_picture(self) -> bool:
        """Whether it is a picture."""
        return self.file.endswith(".png")


class Losses(NamedTuple):
    """What a task says of one micro-batch; every part is its share of the mean over the whole batch.

    >>> import torch
    >>> Losses(torch.tensor(1.5), torch.tensor(1.0), {"z_loss": torch.tensor(0.5)}).aux
    ()
    """

    loss: Tensor
    """What to differentiate: ``main`` and all parts."""
    main: Tensor
    """The loss that is reported and that evaluations report too."""
    parts: dict[str, Tensor]
    """What is added to it, coefficients included, by the key in the rows of metrics."""
    aux: tuple[Any, ...] = ()
    """What the sublayers reported (see ``normstream.layers.Layer``)."""


@runtime_checkable
class TaskData(Protocol):
    """Both splits of a data set; ``Task.load`` makes it."""

    @property
    def config(self) -> Any:
        """What it was made from."""
        ...

    @property
    def corpus_hash(self) -> str:
        """SHA-256 over all samples and the side of the split that each is on."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What made the token ids; None where there are none."""
        ...

    @property
    def train(self) -> Samples:
        """The training split."""
        ...

    @property
    def validation(self) -> Samples:
        """The held-out split."""
        ...


class Task(ABC):
    """One task of one run; the subclass says how, and ``TASKS`` knows it by name.

    Args:
        config: the run, a ``normstream.training.TrainConfig`` whose model fits the data (see ``resolve``).
        data: what ``load`` gave.
    """

    name: ClassVar[TaskName]
    """Name in configurations."""
    title: ClassVar[str]
    """Name in reports."""
    unit: ClassVar[str]
    """What sizes of data are counted in."""
    loss_title: ClassVar[str] = "validation loss"
    """What the reported loss is, for axes and tables."""
    loss_unit: ClassVar[str] = "nats"
    """Unit of the loss; empty where it has none."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """What ``evaluate`` and ``judge`` report besides the loss, the most telling one first."""
    artifacts: ClassVar[tuple[Artifact, ...]] = ()
    """Files that ``judge`` leaves, for reports."""
    baseline: ClassVar[str]
    """What ``baseline_loss`` is the loss of, as the end of the sentence "the loss of knowing only ..."."""
    model_config: ClassVar[type[ModelConfig]]
    """Class of ``TrainConfig.model``."""
    data_config: ClassVar[type[Any]]
    """Class of ``TrainConfig.data``."""
    lrs: ClassVar[tuple[float, ...]] = (2e-3, 1e-2)
    """Learning rates of a comparison, unless it is given others."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Fields of ``TrainConfig`` that the command line starts from where this task wants others than its own."""
        return {}

    def __init__(self, config: Any, data: Any) -> None:
        self.config, self.data = config, data
        self.eval_batches: list[Any] = list(spread(data.validation, config.batch_size, config.eval_batches))

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises ValueError where the parts of a ``TrainConfig`` do not fit this task."""
        return

    @classmethod
    @abstractmethod
    def load(cls, config: Any) -> TaskData:
        """The data that a data config describes; raises ValueError or ImportError that says what to do."""

    @classmethod
    @abstractmethod
    def resolve(cls, model: Any, data: Any) -> Any:
        """The model config with what the data decides: vocabulary, classes, size of images."""

    @classmethod
    def tokens_per_sample(cls, config: Any, data: Any) -> float:
        """Positions of one sample that the model works on, on average, for a resolved ``TrainConfig`` and its data."""
        return data.train.tokens_per_sample

    @abstractmethod
    def losses(self, model: Any, batch: Any, n_targets: int, share: float) -> Losses:
        """The losses of one micro-batch on the model's device, in training.

        What is random is drawn from torch's generators, which the loop has seeded for this step and micro-batch.

        Args:
            model: in training mode.
            batch: the micro-batch.
            n_targets: targets of the whole batch, which sums over targets are divided by.
            share: part of the whole batch's samples that are in the micro-batch, for whatever is a mean over it.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``loss`` and such metrics as cost little, over ``self.eval_batches``, in evaluation mode, restored after.

        Two evaluations of the same weights give the same numbers: what is random is drawn from a fixed seed.
        """

    def judge(self, model: nn.Module, folder: Path) -> dict[str, float]:
        """Metrics that are measured once, after the last step; may leave files such as pictures in the run's folder."""
        return {}

    @abstractmethod
    def uniform_loss(self) -> float:
        """The loss of a guess that knows nothing; a run that stays above it has diverged."""

    @abstractmethod
    def baseline_loss(self) -> float:
        """The validation loss of a model that ignores its input; a run that ends no better has collapsed."""


def spread(samples: Samples, batch_size: int, batches: int | None) -> Iterator[Any]:
    """``batches`` batches of samples spread evenly over a split, all samples in order if None or if there are no more.

    Each batch is made when its turn comes, so a long text stays where it is.

    Raises:
        ValueError: if there is no sample.
    """
    n = len(samples) if batches is None else min(len(samples), batches * batch_size)
    if n == 0:
        raise ValueError(f"no sample to evaluate on: the data, of size {samples.size}, holds less than one; give more")
    numbers = np.arange(n) * len(samples) // n
    return (samples.batch(numbers[start : start + batch_size]) for start in range(0, n, batch_size))


def check_length(config: Any, name: str = "seq_len") -> None:
    """Raises ValueError if samples (their longest is that field of the data config) are longer than the model takes."""
    length, longest = getattr(config.data, name), config.model.max_seq_len
    if length > longest:
        raise ValueError(f"data.{name} {length} is above model.max_seq_len {longest}; change one")


def has_targets(batches: list[AnyBatch]) -> bool:
    """Whether any of some batches has a target that counts."""
    return any(batch.n_targets for batch in batches)
