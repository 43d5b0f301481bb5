"""Whether a converted checkpoint is the same model: its tensors are read back, and its logits compared."""

from pathlib import Path

import torch
from torch import Tensor, nn

from normstream.checkpoints.conversion.convert import Format, Stored, in_convention, write_tensors_of
from normstream.checkpoints.conversion.files import open_checkpoint
from normstream.checkpoints.conversion.settings import decoder_config
from normstream.checkpoints.source import load_source
from normstream.models import DecoderLM
from normstream.training.checkpoint import load_model_tensors

N_TOKENS = 31
TOLERANCE = 1e-4
"""Largest difference of logits, as a part of the largest logit; float32 gives about 1e-6."""


def read_back(folder: Path, name: Format, written: Stored) -> Stored:
    """Reads a folder and compares every tensor and the eps and gain of every norm with what was written, exactly.

    Raises ValueError naming the role.
    """
    found = open_checkpoint(folder, name, written.family.name).stored
    wrong = [role for role, tensor in written.tensors.items() if not torch.equal(found.tensors[role], tensor)]
    if wrong:
        raise ValueError(f"{wrong[0]} was not read back as it was written; the disk or the memory is faulty")
    for role, norm in written.norms.items():
        read = found.norms[role]
        if (read.kind, read.gain, read.eps) != (norm.kind, norm.gain, norm.eps):
            raise ValueError(
                f"{role} is written as {norm.kind}, gain {norm.gain}, eps {norm.eps:g} but read as {read.kind}, gain "
                f"{read.gain}, eps {read.eps:g}: the configuration of {name} does not hold it, so nothing was written"
            )
    return found


def logits_error(source: tuple[Path, Format, Stored], target: tuple[Path, Format, Stored]) -> float | None:
    """Largest difference of the logits of two folders, as a part of the largest logit.

    A folder of ``hf`` or ``normstream`` is run as it is. The code of Megatron and of SiameseNorm's authors is not at
    hand: their tensors are run in our decoder. None where that has no form for the model.

    Raises ValueError if it is larger than rounding explains.
    """
    settings = source[2].settings
    if source[2].family.conventions is None:
        return None
    try:
        decoder_config(settings)
    except ValueError:  # our decoder cannot express it
        return None
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(settings["vocab_size"], (1, min(N_TOKENS, settings["max_seq_len"])), generator=generator)
    wanted, got = (_logits(_runnable(*side), tokens) for side in (source, target))
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    if not error <= TOLERANCE:
        raise ValueError(
            f"the logits differ by {error:.1e} of the largest one, more than rounding explains ({TOLERANCE:g}): "
            f"{source[1]} and {target[1]} do not describe the same model, so nothing was written"
        )
    return error


def _runnable(folder: Path, name: Format, stored: Stored) -> nn.Module:
    """A folder's model: its own, or ours with the folder's tensors."""
    if name in ("hf", "normstream"):
        return load_source(folder).model
    ours = in_convention(stored, "normstream")
    model = DecoderLM(decoder_config(ours.settings))
    load_model_tensors(model, write_tensors_of("normstream", ours), folder)
    return model.eval()


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits
