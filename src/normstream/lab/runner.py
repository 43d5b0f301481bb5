"""Doing one run of a comparison: out of memory is an answer, not an end."""

import gc
from pathlib import Path
from typing import Any

import torch

from normstream.tasks import TaskData
from normstream.training.config import TrainConfig
from normstream.training.loop import OnRow, train

OUT_OF_MEMORY = (
    "out of memory: lower batch_size, the length or size of samples, model.dim or model.n_layers, "
    "raise grad_accumulation (the update stays the same), or set activation_checkpointing"
)


def run_one(config: TrainConfig, folder: Path, data: TaskData, on_row: OnRow | None = None) -> dict[str, Any]:
    """Start a run or go on with it; return what its folder cannot say."""
    try:
        # An interrupted run goes on bit for bit, a folder that does not exist yet starts one.
        train(config, folder, resume=True, data=data, on_row=on_row)
        return {}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"status": "out_of_memory", "cause": OUT_OF_MEMORY}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on the CPU or an accelerator.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    message = str(error)
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in message or "out of memory" in message
