"""The command ``sample``: images from a diffusion model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tyro.conf import Positional

from normstream.diffusion.pictures import save_grid
from normstream.diffusion.process import Process
from normstream.diffusion.sampling import Sampler, SamplingConfig
from normstream.lab.live import say
from normstream.models import DiT
from normstream.names import nearest
from normstream.tasks.diffusion import Diffusion, draw
from normstream.tasks.output import refuse_others
from normstream.training.checkpoint import find_checkpoint, load_model, read_checkpoint_config
from normstream.training.config import resolve_device

console = Console(highlight=False)


@dataclass(frozen=True)
class Sample:
    """Draw images from a diffusion run into one picture, a row for each class."""

    checkpoint: Positional[Path]
    """Run folder, or one of its checkpoints; averaged weights are taken where the run has them."""
    classes: tuple[str, ...] = ()
    """Numbers or names of classes, as in 0 1 2 or 0,1,2; by default all."""
    per_class: int = 8
    """Images of each class."""
    guidance: float | None = None
    """Scale of guidance, 1 for none; by default the run's, as everything below."""
    sampler: Sampler | None = None
    """ddim or ddpm."""
    steps: int | None = None
    """Steps of the sampler."""
    eta: float | None = None
    """Noise of ddim."""
    out: Path = Path("samples.png")
    """PNG file to write; must not exist."""
    seed: int = 0
    """Of the noise."""
    device: str = "auto"
    """cpu, cuda, mps; auto takes the best there is."""

    def __call__(self) -> None:
        if self.out.exists():
            raise ValueError(f"{self.out} exists already and is not overwritten; choose another file with --out")
        if self.out.suffix.lower() != ".png":
            raise ValueError(f"the picture is a PNG file, so --out must end in .png, got {self.out}")
        if self.per_class < 1:
            raise ValueError(f"per_class must be at least 1, got {self.per_class}")
        path, device = find_checkpoint(self.checkpoint), resolve_device(self.device)
        config = read_checkpoint_config(path)
        refuse_others("sample", config.task)
        model: DiT = load_model(path).to(device)
        sampling = self.sampling(config.data.sampling)
        given = [text.strip() for part in self.classes for text in part.split(",") if text.strip()]
        names = () if all(text.isdecimal() for text in given) else Diffusion.load(config.data).classes
        classes = [class_number(text, model.config.n_classes, names) for text in given]
        classes = classes or list(range(model.config.n_classes))
        process = Process.of(config.data.schedule, model.config.n_timesteps)
        labels_N = torch.tensor(classes).repeat_interleave(self.per_class)
        images_NCHW = draw(model, process, labels_N, sampling, self.seed)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        save_grid(images_NCHW.unflatten(0, (len(classes), self.per_class)), self.out)
        say(console, f"{len(labels_N)} images, {sampling.sampler} in {sampling.steps} steps: {self.out}")

    def sampling(self, own: SamplingConfig) -> SamplingConfig:
        """The run's settings with those given here.

        >>> Sample(Path("run"), steps=7).sampling(SamplingConfig(guidance=3.0))
        SamplingConfig(sampler='ddim', steps=7, guidance=3.0, eta=0.0, clip=True)
        """
        names: dict[str, Any] = {name: getattr(self, name) for name in ("guidance", "sampler", "steps", "eta")}
        return replace(own, **{name: value for name, value in names.items() if value is not None})


def class_number(text: str, n_classes: int, names: Sequence[str]) -> int:
    """The number of the class that a text names, or is the number of.

    Raises ValueError for a number out of range and for a name that no class has.

    >>> class_number("1", 2, ()), class_number("ring", 2, ("circle", "ring"))
    (1, 1)
    """
    if text.isdecimal():
        if int(text) >= n_classes:
            raise ValueError(f"classes must be numbers from 0 to {n_classes - 1} or names, got {text!r}")
        return int(text)
    if text not in names:
        raise ValueError(f"no class is called {text!r}; {nearest(text, names)}")
    return names.index(text)
