"""The command ``normstream inspect``."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from rich.console import Console
from tyro.conf import Positional, arg

from normstream.checkpoints.source import Attention, load_source
from normstream.checkpoints.tensors import new_folder, refuse_existing
from normstream.inspect.inspection import Inspection
from normstream.inspect.paths import short_name
from normstream.inspect.report.page import write_report
from normstream.inspect.report.tables import show
from normstream.inspect.run import TOKENS, inspect_model
from normstream.inspect.text_option import given_text
from normstream.lab.live import say
from normstream.training.files import write_json
from normstream.training.metrics import finite

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Inspect:
    """Where every norm of a model sits, and what its residual stream does: a table, JSON and a report."""

    model: Positional[str]
    """Folder of a Hugging Face model, its config.json alone, a name on the hub, or a run of normstream."""
    text: str | None = None
    """What the model reads; random tokens by default."""
    text_file: Path | None = None
    """The same from a file."""
    tokens: int = TOKENS
    """Length of the sequence; the nearest prime below it is taken."""
    attention: Attention = "eager"
    """Attention code of transformers."""
    dtype: Dtype = "float32"
    """Dtype that the model runs in."""
    seed: int = 0
    """Seed of random tokens, and of weights that are drawn."""
    model_type: str | None = None
    """Model type for a config.json that does not state it, as bert."""
    trust_remote_code: bool = False
    """Run Python files that come with the checkpoint."""
    out: Path | None = None
    """Folder for inspection.json and report.html; must not exist yet. By default runs/inspect-NAME."""
    json: Annotated[bool, arg(help="Print the JSON instead, and write nothing.")] = False

    def __call__(self) -> None:
        text = given_text(self.text, self.text_file)
        out = None if self.json else self.out or Path("runs") / f"inspect-{short_name(self.model)}"
        if out:
            refuse_existing(out)
        console = Console(highlight=False)
        with Console(stderr=True).status("") as status:
            status.update("loading the model")
            loaded = load_source(
                self.model,
                dtype=DTYPES[self.dtype],
                attention=self.attention,
                seed=self.seed,
                trust_remote_code=self.trust_remote_code,
                model_type=self.model_type,
            )
            inspection = inspect_model(
                loaded, text, self.tokens, self.seed, progress=lambda what: status.update(f"measuring: {what}")
            )
        if out is None:
            say(console, json.dumps(as_json(inspection), indent=2, allow_nan=False))
            return
        with new_folder(out) as folder:
            write_json(folder / "inspection.json", as_json(inspection))
            write_report(inspection, folder / "report.html")
        show(inspection, console, out)


def as_json(inspection: Inspection) -> dict[str, object]:
    """What inspection.json holds: the fields of ``Inspection``, null for a number that is not finite."""
    return finite(json.loads(json.dumps(asdict(inspection))))
