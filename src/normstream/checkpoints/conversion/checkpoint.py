"""From a checkpoint folder to one of another format: read, convert, write, compare."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from normstream.checkpoints.conversion.convert import Format, GainChoice, Stored, in_convention
from normstream.checkpoints.conversion.files import Opened, open_checkpoint, save_as
from normstream.checkpoints.conversion.gains import rounding
from normstream.checkpoints.conversion.verify import logits_error, read_back
from normstream.checkpoints.tensors import SHARD_BYTES, new_folder, refuse_existing
from normstream.names import shortened
from normstream.norms import Gain


@dataclass(frozen=True)
class Conversion:
    """What was converted."""

    family: str
    source_format: Format
    target_format: Format
    n_tensors: int
    """Tensors by role; a fused matrix counts as its parts."""
    n_norms: int
    """Gains of norms."""
    gains: tuple[Gain, ...]
    """Conventions of gains in the target."""
    rounding: float
    """Largest error of a gain that changed its convention; 0 where all were copied."""
    logits_error: float | None
    """As a part of the largest logit; None where it could not be compared or was not asked for."""
    verified: bool
    """Whether the target was read back and compared bit by bit."""
    notes: tuple[str, ...]
    """What to know about it, in sentences."""


def convert_checkpoint(
    source: Path,
    target: Path,
    to: Format,
    *,
    source_format: Format | None = None,
    family: str | None = None,
    stored_gain: Gain | None = None,
    gain: GainChoice = "keep",
    max_shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> Conversion:
    """Writes the checkpoint in the folder ``source`` as a folder ``target`` of the format ``to``.

    Args:
        source: what to convert; it is only read.
        target: the new folder; it must not exist, and appears whole or not at all.
        to: its format.
        source_format: format of the source; None finds out.
        family: family of the source, where its files do not say.
        stored_gain: the convention of its gains, where its files do not say or say it wrongly.
        gain: convention of gains in the target, where its format leaves the choice; ``keep`` changes as little as
            it can.
        max_shard_bytes: largest file of tensors.
        verify: whether to read the target back and to compare logits.

    Raises:
        ValueError: if there is no such folder; if a tensor is missing, unknown or of a wrong shape, naming its role; if
            the target cannot express the model; if it exists already; if the logits differ.
    """
    refuse_existing(target)
    if not source.is_dir():
        raise ValueError(f"expected the folder of a checkpoint, got {source}; its config and tensors are read together")
    opened = open_checkpoint(source, source_format, family, stored_gain)
    written = in_convention(opened.stored, to, gain)
    error = None
    with new_folder(target) as folder:
        save_as(to, written, folder, opened, max_shard_bytes)
        if verify:
            found = read_back(folder, to, written)
            error = logits_error((opened.folder, opened.format, opened.stored), (folder, to, found))
    return _summary(opened, written, to, error, verify)


def _summary(opened: Opened, written: Stored, to: Format, error: float | None, verified: bool) -> Conversion:
    before = opened.stored
    changed = [role for role, norm in written.norms.items() if norm.gain != before.norms[role].gain]
    worst = max(
        (rounding(before.tensors[r], before.norms[r].gain, written.norms[r].gain) for r in changed), default=0.0
    )
    return Conversion(
        written.family.name,
        opened.format,
        to,
        len(written.tensors),
        len(written.norms),
        tuple(sorted({norm.gain for norm in written.norms.values()})),
        worst,
        error,
        verified,
        tuple(_notes(opened, written, to, len(changed), worst)),
    )


def _notes(opened: Opened, written: Stored, to: Format, n_changed: int, worst: float) -> Iterator[str]:
    if left_out := opened.stored.left_out:
        yield f"left out, for it holds no weights or is equal to another tensor: {shortened(left_out)}"
    if n_changed:
        yield f"{n_changed} gains changed their convention, in float32 at least; largest rounding error {worst:.1e}"
    if to != "normstream":
        return
    if written.family.conventions is None:
        yield f"normstream has no class for the family {written.family.name} yet: these are names only"
        return
    if {tensor.dtype for tensor in written.tensors.values()} & {torch.bfloat16, torch.float16}:
        yield "the tensors keep their dtype in the file; normstream computes in float32"
    if not (opened.folder / "tokenizer.json").is_file():
        yield "no tokenizer.json came with it: normstream eval and generate take bytes for tokens"
