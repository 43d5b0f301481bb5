"""The command line: from words to a command of ``normstream.commands``, and from errors to exit statuses."""

import io
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, Union

import tyro
from rich.console import Console
from tyro.conf import subcommand

from normstream.__about__ import __version__
from normstream.commands import COMMANDS, Compare, Train, console
from normstream.lab import CompareConfig
from normstream.lab.live import say
from normstream.lab.plan import default_plan
from normstream.lab.runner import OUT_OF_MEMORY, is_out_of_memory
from normstream.models import PRESETS, preset
from normstream.names import nearest
from normstream.tasks import TASKS, get_task
from normstream.training import TrainConfig, config_from_yaml, default_config

DESCRIPTION = "Where do the norms sit on a Transformer's residual stream? Compare placements, and train with them."


def main(argv: list[str] | None = None) -> None:
    """Entry point of the ``normstream`` command: exit status 0, 2 for bad input, 1 when out of memory, 128 + signal.

    >>> main(["report", "no-such-folder"])
    Traceback (most recent call last):
    SystemExit: 2
    """
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode must not end a run
    try:
        parse(argv)()
    except (ValueError, OSError, ImportError) as error:
        fail(error, 2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(OUT_OF_MEMORY, 1)
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C at once; what was saved before is kept", 130)


def fail(message: object, status: int) -> NoReturn:
    """Says on standard error what is wrong and ends with an exit status."""
    Console(stderr=True, highlight=False).print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    sys.exit(status)


def parse(argv: list[str]) -> Any:
    """The command that the arguments mean, ready to be called.

    A config file, a task, a preset or the run that is resumed gives the defaults; the other arguments change them.

    >>> parse(["compare", "--steps", "50"]).plan.base.steps
    50
    """
    commands = {kind.__name__.lower(): kind for kind in COMMANDS}
    name, *rest = argv or ["--help"]
    if name == "--version":
        say(console, __version__)
        sys.exit(0)
    if name.startswith("-"):
        overview: Any = Union[tuple(Annotated[kind, subcommand(word)] for word, kind in commands.items())]  # noqa: UP007
        return tyro.cli(overview, prog="normstream", description=DESCRIPTION, args=[name])
    if name not in commands:
        raise ValueError(f"unknown command {name!r}; {nearest(name, commands)}")
    kind = commands[name]
    default = {Train: train_defaults, Compare: compare_defaults}.get(kind, lambda _: None)(rest)
    return tyro.cli(kind, prog=f"normstream {name}", args=rest, **({} if default is None else {"default": default}))


def train_defaults(argv: list[str]) -> Train:
    """The defaults of ``train``: those of a config file, else of the run that is resumed, else of the task."""
    file = config_file(argv, Train.out)
    config = default_config(chosen_task(argv)) if file is None else read_config(file, TrainConfig)
    check_task(argv, config, file)
    return Train(run=with_preset(argv, config))


def compare_defaults(argv: list[str]) -> Compare:
    """The defaults of ``compare``, found in the same way."""
    file = config_file(argv, CompareConfig.out)
    plan = default_plan(chosen_task(argv)) if file is None else read_config(file, CompareConfig)
    check_task(argv, plan.base, file)
    return Compare(plan=replace(plan, base=with_preset(argv, plan.base)))


def chosen_task(argv: list[str]) -> str:
    """The task that ``--task`` names, else the first that trains models of the preset's kind, else lm.

    >>> chosen_task(["--preset", "tiny"])
    'lm'
    """
    name = option(argv, "--preset")
    if (given := option(argv, "--task")) is not None or name is None:
        return "lm" if given is None else given
    kind = type(preset(name))
    fits = [task.name for task in TASKS.values() if task.model_config is kind]
    return fits[0] if fits else "lm"


def check_task(argv: list[str], config: TrainConfig, file: Path | None) -> None:
    """Raises ValueError if ``--task`` says another task than the file that the config is from."""
    given = option(argv, "--task")
    if file is not None and given not in (None, config.task):
        raise ValueError(f"--task {given} contradicts {file}, whose task is {config.task}; leave one of them out")


def with_preset(argv: list[str], config: TrainConfig) -> TrainConfig:
    """The config with the dimensions of ``--preset``, if there is one; ValueError if it is of another kind of model."""
    if (name := option(argv, "--preset")) is None:
        return config
    model, kind = preset(name), get_task(config.task).model_config
    if type(model) is not kind:
        fits = [other for other, known in PRESETS.items() if type(known) is kind]
        raise ValueError(
            f"preset {name} is a {type(model).__name__}, but task {config.task} trains a {kind.__name__}; "
            f"presets that fit: {', '.join(fits) or 'none'}"
        )
    return replace(config, model=replace(model, placement=config.model.placement))


def config_file(argv: list[str], out: Path) -> Path | None:
    """The file that ``--config`` names, or with ``--resume`` the config of the folder that is gone on with."""
    if (given := option(argv, "--config")) is not None:
        return Path(given)
    own = Path(option(argv, "--out") or out) / "config.yaml"
    return own if "--resume" in argv and own.is_file() else None


def option(argv: list[str], name: str) -> str | None:
    """The value of an option, the last one if it is repeated, before everything else is parsed.

    >>> option(["--out=runs/a", "--out", "runs/b", "--out=runs/c"], "--out")
    'runs/c'
    """
    value = None
    for word, following in pairwise([*argv, ""]):
        if word == name:
            value = following
        elif word.startswith(f"{name}="):
            value = word.removeprefix(f"{name}=")
    return value


def read_config(path: Path, kind: type[Any]) -> Any:
    """A config file as ``kind``; ValueError that names the file."""
    try:
        return config_from_yaml(path.read_text(encoding="utf-8"), kind)
    except (OSError, ValueError) as error:
        raise ValueError(f"config file {path}: {error}") from error
