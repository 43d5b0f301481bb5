"""Everything that determines a training run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from normstream.checks import check_types
from normstream.models import ModelConfig
from normstream.names import check_choice
from normstream.ops import Backend
from normstream.optim import OptimizerConfig, ScheduleConfig
from normstream.optim.qk_clip import QK_NORM
from normstream.tasks import TaskData, TaskName, get_task
from normstream.tasks.chunked_loss import LARGE_VOCABULARY
from normstream.tasks.losses import Precision

Recomputation = Literal["none", "inputs", "selective", "layer"]
ChunkedLoss = Literal["auto", "always", "never"]
_COUNTS = (
    *("steps", "batch_size", "grad_accumulation", "recompute_every", "eval_every", "eval_batches"),
    *("stats_every", "checkpoint_every", "keep_checkpoints"),
)


@dataclass(frozen=True)
class TrainConfig:
    """A training run; every value is checked when it is made.

    Raises ValueError for values that do not fit each other.

    >>> TrainConfig(steps=100, schedule=ScheduleConfig(warmup=10)).batch_size
    8
    """

    task: TaskName = "lm"
    """What is learnt: lm (the next token), mlm (masked tokens), translation, vision (classes of images), diffusion
    (images), classification (of texts or pairs of them); it decides what model and data are."""
    model: ModelConfig = field(default=cast(ModelConfig, None))
    """The model; what the data decides, such as its vocab_size, is taken from there."""
    data: Any = None
    """The data, and how samples are made of it."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Which one, and its options."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    steps: int = 300
    """Number of updates."""
    batch_size: int = 8
    """Samples of one update, over all its micro-batches."""
    grad_accumulation: int = 1
    """Micro-batches that the samples of one update are cut into; the update stays the same."""
    clip: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    z_loss: float = 0.0
    """Coefficient of mean(log^2 Z), added to the training loss (PaLM 1e-4, OLMo 2 1e-5); evaluations leave it out."""
    label_smoothing: float = 0.0
    """Part of each target's probability that is spread over all classes in training; evaluations leave it out."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which evaluations then use (DiT 0.9999); 0 keeps none."""
    precision: Precision = "fp32"
    """fp32, or autocast to bf16 or to fp16 with dynamic loss scaling; parameters are float32 always."""
    seed: int = 0
    """Seed of the initialization, the data order and dropout."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    junctions: Backend = "auto"
    """How junctions run: fused where that can be (auto), in plain torch (plain); cpp and triton raise if missing."""
    activation_checkpointing: Recomputation = "none"
    """What the backward pass recomputes instead of finding it kept: nothing, the sublayers' inputs (inputs), everything
    but matrix products and attention (selective), or whole layers (layer)."""
    recompute_every: int = 1
    """Every how many layers one is recomputed, if any is."""
    chunked_loss: ChunkedLoss = "auto"
    """Output head and loss in pieces, so that the logits are never there as a whole; auto does so on CUDA from 32768
    tokens of vocabulary."""
    tune_allocator: bool = True
    """On Linux with glibc, let the process keep memory that is freed instead of asking for it again at every step."""
    prefetch: int = 2
    """Batches that a thread prepares ahead of the updates; 0 prepares each when its turn comes."""
    run_ahead: bool = True
    """On CUDA, queue an update before the numbers of the one before have been read, where the optimizer allows it."""
    eval_every: int = 25
    """Steps between evaluations; one more follows the last step."""
    eval_batches: int = 16
    """Batches of an evaluation, spread evenly over the validation split."""
    stats_every: int = 25
    """Steps between rows of per-layer statistics."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one more follows the last step."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto takes cuda, else mps, else cpu."""
    init_from: Path | None = None
    """Checkpoint folder, run folder or .safetensors file whose weights the run starts from."""

    @staticmethod
    def nested(values: Mapping[str, Any]) -> dict[str, type[Any]]:
        """The classes of model and data that a config with these plain values has; the task decides."""
        task = get_task(values.get("task", "lm"))
        return {"model": task.model_config, "data": task.data_config}

    def __post_init__(self) -> None:
        for name, kind in self.nested({"task": self.task}).items():
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, kind())
            elif type(value) is not kind:
                raise ValueError(
                    f"task {self.task} takes {name} of class {kind.__name__}, got {type(value).__name__}; "
                    f"give another task or another {name}"
                )
        check_types(self)
        check_choice("precision", self.precision, Precision)
        check_choice("junctions", self.junctions, Backend)
        check_choice("activation_checkpointing", self.activation_checkpointing, Recomputation)
        check_choice("chunked_loss", self.chunked_loss, ChunkedLoss)
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("seed", "prefetch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.compile and self.activation_checkpointing == "inputs":
            raise ValueError(
                "activation_checkpointing inputs does not go with compile, which decides by itself what to keep; "
                "take selective, or leave compile out"
            )
        if self.batch_size % self.grad_accumulation:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by grad_accumulation {self.grad_accumulation}; "
                "change one of them"
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, or None, got {self.clip}")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must be at least 0, got {self.z_loss}")
        if self.schedule.warmup > self.steps:
            raise ValueError(
                f"schedule.warmup {self.schedule.warmup} is longer than the run of {self.steps} steps; change either"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be in [0, 1), got {self.ema}")
        if self.chunked_loss == "always" and (self.task != "lm" or self.label_smoothing > 0):
            raise ValueError(
                "chunked_loss always is for task lm without label_smoothing; leave it at auto, which takes it where it "
                "can be had"
            )
        get_task(self.task).check(self)
        if self.optimizer.clip_threshold is not None:
            normed = [layer for layer in range(self.model.n_layers) if self.model.inner_of(layer).qk != "none"]
            if normed:
                raise ValueError(QK_NORM.format(where=f"in layer {normed[0]}"))

    def is_chunked(self, device: torch.device) -> bool:
        """Whether a language model's head and loss are computed in chunks.

        >>> TrainConfig().is_chunked(torch.device("cpu"))
        False
        """
        if self.chunked_loss == "auto":
            large = getattr(self.model, "vocab_size", 0) >= LARGE_VOCABULARY
            return device.type == "cuda" and large and self.task == "lm" and self.label_smoothing == 0
        return self.chunked_loss == "always"


def default_config(task: str) -> TrainConfig:
    """What the command line starts from: the task's own defaults, else those of ``TrainConfig``.

    Raises ValueError with the nearest name for an unknown task.

    >>> default_config("lm") == TrainConfig()
    True
    """
    kind = get_task(task)
    return TrainConfig(task=kind.name, **kind.defaults())


def resolve(config: TrainConfig, data: TaskData) -> TrainConfig:
    """The config with what the data decides in the model, its vocabulary size for one; a run writes this one."""
    return replace(config, model=get_task(config.task).resolve(config.model, data))


def resolve_device(name: str) -> torch.device:
    """The device that ``name`` means, auto being cuda, else mps, else cpu; raises ValueError if it is not there.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(best)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} is not available here: {str(error).splitlines()[0]}") from None
    return device
