"""A model from wherever it is: a Hugging Face folder, a config alone, a hub name, or a run of normstream.

    loaded = load_source("path/to/folder")     # config.json and weights; without weights they are drawn
    loaded = load_source("path/config.json")   # the config alone: weights are drawn
    loaded = load_source("org/name")           # from the Hugging Face hub, or its cache
    loaded = load_source("runs/train")         # a run folder or checkpoint of normstream

Files and config are checked before a model is built (``tensors.py``, ``config_check.py``). Code that comes with a
checkpoint runs only if it is asked for.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from normstream.checkpoints.config_check import check_config, model_classes
from normstream.checkpoints.fill import fill_model, shape_of
from normstream.checkpoints.tensors import first_line, read_tensors, stored_dtype, weight_files
from normstream.data.extras import import_extra
from normstream.data.tokenizer import load_tokenizer
from normstream.names import check_choice
from normstream.training.checkpoint import find_checkpoint, list_checkpoints, load_model, read_checkpoint_config

Attention = Literal["eager", "sdpa"]
"""Attention code of transformers that every machine has."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")
HUB_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "model*.safetensors")
"""What is fetched from the hub; ``.bin`` files only where there are no safetensors, code only if it may run."""
OTHER_WEIGHTS = (".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".pt", ".pth")
"""Weights that are not read: a folder that has only these is not one of a config alone."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on the CPU, and where it came from."""

    model: nn.Module
    config: Any
    """The config object of transformers, or normstream's ``DecoderConfig``."""
    tokenizer: Any
    """The tokenizer of transformers, normstream's own, or None where there is none."""
    weights: Literal["checkpoint", "drawn"]
    source: str
    """As it was given."""
    is_ours: bool
    """Whether it is normstream's ``DecoderLM``."""
    folder: Path | None = None
    """Where its files are; None for a config.json alone."""
    notes: tuple[str, ...] = field(default=())
    """What was left out or assumed, in sentences."""


def require_transformers() -> ModuleType:
    """The transformers package; ImportError that names the extra if it is not installed.

    >>> require_transformers().__name__
    'transformers'
    """
    return import_extra("transformers", "hf")


def load_source(
    source: str | Path,
    dtype: torch.dtype | None = torch.float32,
    attention: Attention = "eager",
    seed: int = 0,
    trust_remote_code: bool = False,
    model_type: str | None = None,
) -> LoadedModel:
    """The model that ``source`` means: a folder, a config.json, a name on the hub, or a run of normstream.

    It has the head that the architecture in its config has; with no architecture there, the language-model head that
    its tensors make complete, or none.

    Args:
        source: see the module.
        dtype: dtype of the model; None takes one that holds all that the files have.
        attention: attention code of transformers; normstream's own models have one.
        seed: of the weights where they are drawn.
        trust_remote_code: whether Python files of the checkpoint may run.
        model_type: type for a config.json that does not state it, as ``bert``.

    Raises:
        ValueError: if there is nothing of the kind; for a broken or quantised file; for a config without model_type
            or eps; if a tensor is missing, has another shape, or is no part of the model.
        ImportError: if it takes transformers, which is not installed.
    """
    check_choice("attention", attention, Attention)
    path = Path(source).expanduser()
    if path.is_dir() and _is_run(path):
        return _load_ours(path, str(source), dtype or torch.float32)
    require_transformers()
    folder, config_file = _locate(path, str(source), trust_remote_code)
    notes: list[str] = []
    with quiet_transformers():
        raw, config = check_config(config_file, trust_remote_code, model_type, notes)
        classes = model_classes(raw, config, folder, trust_remote_code)
        stored = folder if folder and _has_weights(folder) else None
        dtype = dtype or (stored_dtype(stored) if stored else torch.float32)
        options = {"dtype": dtype, "attn_implementation": attention}
        with _attention_errors(attention, classes):
            if stored:
                model = fill_model(classes, config, read_tensors(stored), stored, options, notes)
            else:
                model = _draw(classes[0], config, options, seed)
        tokenizer = _tokenizer(folder, config, trust_remote_code, notes) if folder else None
    weights = "checkpoint" if stored else "drawn"
    return LoadedModel(model.eval(), model.config, tokenizer, weights, str(source), False, folder, tuple(notes))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings, loading reports and progress bars of transformers: what matters is an error or a note here.

    Nor torch's warning about matrices without entries, which some models have by their config.
    """
    logging = require_transformers().logging
    verbosity, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


@contextmanager
def _attention_errors(attention: Attention, classes: Sequence[type[nn.Module]]) -> Iterator[None]:
    """In short what transformers says at length of a model without this attention code."""
    try:
        yield
    except ValueError as error:
        if attention == "eager" or "attn_implementation" not in str(error):
            raise
        name = classes[0].__name__
        raise ValueError(f"transformers has no {attention} attention for {name}: use --attention eager") from error


def _is_run(path: Path) -> bool:
    return (path / "state.json").is_file() or bool(list_checkpoints(path / "checkpoints") or list_checkpoints(path))


def _load_ours(path: Path, source: str, dtype: torch.dtype) -> LoadedModel:
    folder = find_checkpoint(path)
    model = load_model(folder).to(dtype)
    tokenizer = load_tokenizer(read_checkpoint_config(folder).data.tokenizer)
    return LoadedModel(model, model.config, tokenizer, "checkpoint", source, True, folder)


def _locate(path: Path, source: str, trust_remote_code: bool) -> tuple[Path | None, Path]:
    """The folder (None for a config alone) and the config.json that a source means."""
    if path.is_file() and path.suffix == ".json":
        return None, path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json, and no checkpoint of normstream either")
        return path, path / "config.json"
    if path.exists() or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"no model at {source}: expected a folder, a config.json, a run folder or a hub name")
    folder = fetch(source, trust_remote_code)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{source} on the Hugging Face hub has no config.json")
    return folder, folder / "config.json"


def fetch(name: str, trust_remote_code: bool = False) -> Path:
    """The folder of a hub model in the local cache, fetched if it is not there; without code unless it may run.

    Raises:
        ValueError: if the hub does not give it.
    """
    from huggingface_hub import snapshot_download

    patterns = [*HUB_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not weight_files(folder):
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, "pytorch_model*.bin"]))
    except Exception as error:  # the hub's client has a dozen kinds, from offline mode to a name that it refuses
        reason = f"the Hugging Face hub does not give it: {first_line(error)}"
        raise ValueError(f"{name} is no local folder, and {reason}") from error
    return folder


def _has_weights(folder: Path) -> bool:
    """Whether a folder has weights that can be read; ValueError if it has others only."""
    if weight_files(folder):
        return True
    if others := [path.name for path in sorted(folder.iterdir()) if path.suffix in OTHER_WEIGHTS]:
        raise ValueError(f"{folder} has weights as {others[0]} only; expected .safetensors (or a PyTorch .bin)")
    return False


def _draw(kind: Any, config: Any, options: Mapping[str, Any], seed: int) -> nn.Module:
    shape_of(kind, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind._from_config(config, **options)


def _tokenizer(folder: Path, config: Any, trust_remote_code: bool, notes: list[str]) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    tokenizers = require_transformers().AutoTokenizer
    try:
        # Said outright, since transformers would otherwise ask at the terminal whether a tokenizer's code may run.
        return tokenizers.from_pretrained(folder, config=config, trust_remote_code=trust_remote_code)
    except Exception as error:  # each tokenizer fails in its own way; a model can be looked at without one
        notes.append(f"the tokenizer cannot be loaded: {first_line(error)}")
        return None
