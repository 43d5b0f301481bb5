"""A training step of any model: forward, backward, clipping, fused AdamW; the same for all that are compared."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import Case
from benchmarks.memory import kept_tensors
from benchmarks.models import Trainee
from benchmarks.shapes import ModelShape

MAX_NORM = 1.0


class Memory(NamedTuple):
    """What one step needs besides parameters, gradients and the optimizer's state."""

    kept_bytes: int
    """Kept for the backward pass, each storage once; without parameters and copies of them in a lower precision."""
    weight_copies_bytes: int
    """Those copies."""
    peak_bytes: int | None
    """On a GPU: the most that was allocated during a step above what was before it."""


def batches(shape: ModelShape, device: torch.device, count: int = 4) -> list[Tensor]:
    """Random tokens (B, T + 1) from a fixed seed, the same for every model.

    >>> from benchmarks.shapes import SHAPES
    >>> [tuple(tokens.shape) for tokens in batches(SHAPES["tiny"], torch.device("cpu"), count=1)]
    [(2, 17)]
    """
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.seq_len + 1)
    return [torch.randint(shape.vocab_size, size, generator=generator).to(device) for _ in range(count)]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """fp32 as it is, bf16 by autocast; parameters stay in float32."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, torch.bfloat16)


class Step:
    """One model with its optimizer."""

    def __init__(self, trainee: Trainee, data: Sequence[Tensor], precision: str) -> None:
        self.loss_of, self.module, self.precision = trainee.loss, trainee.module, precision
        self.device = data[0].device
        self.module.to(self.device).train()
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.first, self.data = data[0], cycle(data)
        self.fused_calls = 0
        """How many fused operations a step runs, forward and backward."""
        self._loss: list[Tensor] = []

    def forward(self) -> None:
        self._loss.append(self.loss(next(self.data)))

    def backward(self) -> None:
        self._loss.pop().backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean loss of a batch (B, T + 1)."""
        with autocast(self.precision, self.device):
            return self.loss_of(tokens)

    @property
    def case(self) -> Case:
        """The phases of a step."""
        return {"forward": self.forward, "backward": self.backward, "update": self.update}

    def memory(self) -> Memory:
        """Measured in a step of its own."""
        with kept_tensors() as kept:
            loss = self.loss(self.first)
        copies = kept.copies_of(self.parameters)
        everything = kept.nbytes(without=self.parameters)
        activations = kept.nbytes(without=[*self.parameters, *copies])
        del loss, kept, copies
        return Memory(activations, everything - activations, self._peak())

    def _peak(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for phase in self.case.values():
            phase()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
