"""The command ``normstream convert``."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional, arg

from normstream.checkpoints.conversion.convert import Format, GainChoice
from normstream.checkpoints.source import fetch
from normstream.checkpoints.tensors import SHARD_BYTES

Source = Literal["auto"] | Format


@dataclass(frozen=True)
class Convert:
    """Convert a checkpoint to another format: every tensor used once and written once, logits compared."""

    source: Positional[str]
    """Folder of the checkpoint, a run folder, or a name on the Hugging Face hub."""
    target: Positional[Path]
    """New folder; must not exist."""
    to: Format
    """Format of the new folder."""
    from_: Annotated[Source, arg(name="from")] = "auto"
    """Format of the checkpoint; auto finds out from its files."""
    family: str | None = None
    """Family of the model, such as llama or gemma2, where its files do not say."""
    stored_gain: Literal["plain", "zero_centered"] | None = None
    """Whether the source's norms multiply by w (plain) or by 1 + w, where its files do not say or say it wrongly."""
    gain: GainChoice = "keep"
    """Convention in the target, for the formats that leave the choice (normstream, megatron); 1 + w is summed in
    float32."""
    max_shard_gb: float = SHARD_BYTES / 1e9
    """Largest file of tensors, in gigabytes."""
    verify: bool = True
    """Read the target back bit by bit, and compare logits where both sides can run."""

    def __call__(self) -> None:
        from normstream.checkpoints.conversion.checkpoint import convert_checkpoint

        if not 0 < self.max_shard_gb < math.inf:
            raise ValueError(f"max_shard_gb must be above 0 and finite, got {self.max_shard_gb:g}")
        given = Path(self.source).expanduser()
        folder = given if given.exists() else fetch(self.source)
        result = convert_checkpoint(
            folder,
            self.target,
            self.to,
            source_format=None if self.from_ == "auto" else self.from_,
            family=self.family,
            stored_gain=self.stored_gain,
            gain=self.gain,
            max_shard_bytes=int(self.max_shard_gb * 1e9),
            verify=self.verify,
        )
        table = Table("", "", show_header=False, box=None)
        rows = {
            "family": result.family,
            "formats": f"{result.source_format} to {result.target_format}",
            "tensors": f"{result.n_tensors:,} by role, each used once and written once; {result.n_norms} norms",
            "gains": ", ".join(result.gains) or "none",
            "read back": "equal bit by bit" if result.verified else "not asked for",
            "logits": _about_logits(result.logits_error, self.verify),
        }
        for key, value in rows.items():
            table.add_row(key, escape(value))
        console = Console(highlight=False)
        console.print(table)
        for line in (*result.notes, f"Folder: {self.target}"):
            console.print(line, soft_wrap=True, markup=False)


def _about_logits(error: float | None, asked: bool) -> str:
    if not asked:
        return "not asked for"
    if error is None:
        return "not compared: no code here runs this model in both formats"
    return f"differ by {error:.1e} of the largest"
