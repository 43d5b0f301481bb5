"""The command ``translate``: texts through an encoder-decoder."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from tyro.conf import Positional, UseAppendAction

from normstream.data.tokenizer import load_tokenizer
from normstream.data.translation import DecodingConfig
from normstream.lab.live import say
from normstream.tasks.output import refuse_others
from normstream.tasks.translation import translate
from normstream.training.checkpoint import find_checkpoint, load_model, read_checkpoint_config
from normstream.training.config import resolve_device

console = Console(highlight=False)


@dataclass(frozen=True)
class Translate:
    """Translate texts with a run of the task translation: a line for each, an empty one for an empty one."""

    checkpoint: Positional[Path]
    """Run folder, or one of its checkpoints; averaged weights are taken where the run has them."""
    text: UseAppendAction[tuple[str, ...]] = ()
    """A text to translate, and as many more as there are options --text; by default the lines of standard input."""
    beam_size: int | None = None
    """Hypotheses kept at a time, 1 takes the likeliest token each time; by default the run's."""
    length_penalty: float | None = None
    """Exponent of the length penalty; by default the run's."""
    device: str = "auto"
    """cpu, cuda, mps; auto takes the best there is."""

    def __call__(self) -> None:
        path, device = find_checkpoint(self.checkpoint), resolve_device(self.device)
        config = read_checkpoint_config(path)
        refuse_others("translate", config.task)
        data = replace(config.data, decoding=self.decoding(config.data.decoding))
        texts = [text.strip() for text in self.text or sys.stdin]
        if not any(texts):
            raise ValueError("there is nothing to translate; give --text, or lines on standard input")
        model, tokenizer = load_model(path).to(device), load_tokenizer(data.tokenizer)
        found = iter(translate(model, [text for text in texts if text], data, tokenizer))
        for text in texts:
            say(console, next(found) if text else "")

    def decoding(self, own: DecodingConfig) -> DecodingConfig:
        """The run's settings with those given here.

        >>> Translate(Path("run"), beam_size=1).decoding(DecodingConfig()).beam_size
        1
        """
        names: dict[str, Any] = {name: getattr(self, name) for name in ("beam_size", "length_penalty")}
        return replace(own, **{name: value for name, value in names.items() if value is not None})
