"""``normstream rescale``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from normstream.checkpoints.rescaling.checkpoint import rescale_checkpoint
from normstream.checkpoints.rescaling.report import tables
from normstream.checkpoints.rescaling.rescale import HEADROOM, TOLERANCE
from normstream.checkpoints.source import Attention
from normstream.inspect.paths import short_name
from normstream.inspect.text_option import given_text
from normstream.lab.live import say


@dataclass(frozen=True)
class Rescale:
    """Divide a model's residual stream by a power of two, exactly, so that it fits into fp16."""

    model: Positional[str]
    """Folder, config.json, or name on the Hugging Face hub."""
    out: Path | None = None
    """Folder to write; must not exist yet. By default runs/rescaled-<name>."""
    dry_run: bool = False
    """Work everything out and verify it, and write nothing."""
    target: Literal["fp16"] = "fp16"
    """What the stream has to fit into."""
    k: int | None = None
    """Divide by 2^k; by default the smallest k that leaves the head-room."""
    headroom: float = HEADROOM
    """65,504 over the largest |h| that is asked for."""
    text: str | None = None
    """What to measure on; by default random tokens, which say less."""
    text_file: Path | None = None
    """A UTF-8 file with it."""
    tokens: int = 128
    """Most tokens of it."""
    tolerance: float = TOLERANCE
    """Largest error of the float64 logits that counts as the same function, relative to the largest logit."""
    attention: Attention = "eager"
    """Attention code of transformers."""
    trust_remote_code: bool = False
    """Let Python files of the checkpoint run."""
    model_type: str | None = None
    """Type for a config.json that does not say it, as bert."""
    seed: int = 0
    """For random tokens, and for weights where there are none."""
    json: Annotated[bool, arg(help="Print the report as JSON and nothing else.")] = False

    def __call__(self) -> None:
        report = rescale_checkpoint(
            self.model,
            self.folder,
            k=self.k,
            headroom=self.headroom,
            text=given_text(self.text, self.text_file),
            n_tokens=self.tokens,
            tolerance=self.tolerance,
            attention=self.attention,
            trust_remote_code=self.trust_remote_code,
            model_type=self.model_type,
            seed=self.seed,
        )
        if self.json:
            print(json.dumps(report.to_json(), indent=2))
            return
        console = Console(highlight=False)
        console.print(tables(report))
        if self.folder is not None:
            say(console, f"Written: {self.folder}")

    @property
    def folder(self) -> Path | None:
        """Where the model is written; None for a dry run."""
        if self.dry_run:
            return None
        return self.out or Path("runs") / f"rescaled-{short_name(self.model)}"
