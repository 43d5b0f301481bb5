"""Checkpoints: a folder that appears whole or not at all.

    checkpoints/step_00000300/
        model.safetensors      parameters (a tied one once, under its first name)
        optimizer.safetensors  optimizer state, as KEY/PARAMETER NAME
        ema.safetensors        averaged parameters, of a run that averages them (see normstream.training.ema)
        tokenizer.json         the tokenizer, unless it is bytes
        state.json             format, step, SHA-256 of the files above, config, and the state of the run

A checkpoint is written under a temporary name, forced to the disk and renamed. Nothing in it can run code.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from normstream.models import build_model
from normstream.training.config import TrainConfig
from normstream.training.config_file import config_from_dict
from normstream.training.files import read_json, sync, write_json, write_text

FORMAT = 1
"""Version of the layout above; a reader refuses every other."""
STEP_FOLDER = r"step_\d{8,}"
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
AVERAGE_FILE = "ema.safetensors"
TOKENIZER_FILE = "tokenizer.json"
STATE_KEYS = frozenset({"step", "sha256", "config", "corpus_hash", "metrics_bytes", "scaler", "progress"})
"""What state.json has besides its format."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder holds, read and verified."""

    path: Path
    """The folder."""
    step: int
    """Updates done."""
    state: dict[str, Any]
    """state.json."""
    model: dict[str, Tensor]
    """Parameters by name."""
    optimizer: dict[str, Tensor]
    """Optimizer state by ``KEY/PARAMETER NAME``."""
    average: dict[str, Tensor]
    """Averaged parameters by name; empty if the run has no average."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """What to evaluate and to go on from elsewhere: the averaged parameters where there are any."""
        return self.model | self.average


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, a tied one once, and the buffers that belong to the model's state (a router's bias)."""
    return {name: tensor.detach().contiguous() for name, tensor in _state(model).items()}


def _state(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict(keep_vars=True)
    return {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copies tensors into parameters and buffers; raises ValueError unless names and shapes are the same."""
    parameters = _state(model)
    check_fit(parameters, tensors, source)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def check_fit(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raises ValueError that names ``source`` unless ``tensors`` has the names and shapes of a model's ``own``.

    >>> check_fit({"w": torch.zeros(1)}, {}, Path("model.safetensors"))
    Traceback (most recent call last):
    ValueError: model.safetensors does not fit the model: w missing, unknown or of another shape
    """
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong += [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(
            f"{source} does not fit the model: {', '.join(wrong[:5])} missing, unknown or of another shape"
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer made with named parameters, by ``KEY/PARAMETER NAME``."""
    return {
        f"{key}/{name}": value.contiguous()
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of ``optimizer_tensors``.

    Where an optimizer counts its steps on the host, its counters stay there.
    """
    by_name: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        key, name = path.split("/", 1)
        by_name.setdefault(name, {})[key] = value
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if name in by_name:
                host = () if group.get("fused") else ("step",)
                optimizer.state[parameter] = {
                    key: value if key in host else value.to(parameter.device) for key, value in by_name[name].items()
                }


def save_checkpoint(
    folder: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
    tokenizer: str | None = None,
    average: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes ``folder/step_N`` and then removes all but the newest ``keep`` checkpoints.

    ``tokenizer`` is the content of a tokenizer.json, or None for bytes; ``average`` are averaged parameters, or None.

    Raises:
        OSError: if it cannot be written, a full disk for instance; earlier checkpoints are then untouched and nothing
            of the new one remains.
    """
    path = folder / f"step_{step:08d}"
    temporary = folder / f".{path.name}.tmp"
    try:
        folder.mkdir(exist_ok=True)
        temporary.mkdir()
        files: dict[str, Mapping[str, Tensor]] = dict(zip(TENSOR_FILES, (model, optimizer), strict=True))
        if average is not None:
            files[AVERAGE_FILE] = average
        for name, tensors in files.items():
            save_file(dict(tensors), temporary / name)
            sync(temporary / name)
        if tokenizer is not None:
            write_text(temporary / TOKENIZER_FILE, tokenizer)
        digests = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / "state.json", {"format": FORMAT, "step": step, "sha256": digests, **state})
        for name in files:  # safetensors makes files that only their owner can read
            shutil.copymode(temporary / "state.json", temporary / name)
        sync(temporary)
        os.rename(temporary, path)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else str(error)
        kept = ", ".join(p.name for p in list_checkpoints(folder)) or "none"
        advice = f"intact checkpoints: {kept}; make room and resume the run"
        raise OSError(number or errno.EIO, f"could not save the checkpoint: {reason} ({advice})", str(path)) from error
    for old in list_checkpoints(folder)[:-keep]:
        _remove(old)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders in ``folder``, oldest first; empty if there is no such folder."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if re.fullmatch(STEP_FOLDER, path.name))


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed process left half written or half removed."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint folder.

    Raises:
        ValueError: naming the file that is missing, cut off or changed, or for an unknown format.
    """
    state = _read_state(path)
    model, optimizer = (_read_tensors(path / name, state) for name in TENSOR_FILES)
    average = _read_tensors(path / AVERAGE_FILE, state) if AVERAGE_FILE in state["sha256"] else {}
    _verify_tokenizer(path, state)
    return Checkpoint(path, state["step"], state, model, optimizer, average)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest one of a run folder.

    Raises:
        ValueError: if there is none.
    """
    if (path / "state.json").is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise ValueError(f"no checkpoint in {path}; give a run folder or one of its checkpoints/step_... folders")
    return found[-1]


def load_model(path: Path, *, ema: bool = True) -> Any:
    """The model of a checkpoint folder, or of the newest checkpoint of a run folder, in evaluation mode.

    Args:
        path: the folder.
        ema: take the averaged parameters, if the run averaged them; without it the model has those of the last update.

    Raises:
        ValueError: if there is none, or it is cut off, changed or of an unknown format.
    """
    path = find_checkpoint(path)
    state = _read_state(path)
    model = build_model(config_from_dict(state["config"], TrainConfig).model)
    weights = path / "model.safetensors"
    load_model_tensors(model, _read_tensors(weights, state), weights)
    if ema and AVERAGE_FILE in state["sha256"]:
        tensors = _read_tensors(path / AVERAGE_FILE, state)
        check_fit(dict(model.named_parameters()), tensors, path / AVERAGE_FILE)
        load_model_tensors(model, model_tensors(model) | tensors, path / AVERAGE_FILE)
    return model.eval()


def read_checkpoint_config(path: Path) -> TrainConfig:
    """The config of the run that saved the checkpoint; its tokenizer is the one saved with it.

    Raises:
        ValueError: if the checkpoint is incomplete or its tokenizer is not what was saved.
    """
    state = _read_state(path)
    config, saved = config_from_dict(state["config"], TrainConfig), _verify_tokenizer(path, state)
    return config if saved is None else replace(config, data=replace(config.data, tokenizer=str(saved)))


def _read_state(path: Path) -> dict[str, Any]:
    state = read_json(path / "state.json")
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a checkpoint of format {state.get('format')!r}; this version of normstream reads {FORMAT}"
        )
    missing = STATE_KEYS - state.keys() or set(TENSOR_FILES) - state["sha256"].keys()
    if missing:
        raise ValueError(f"{path / 'state.json'} is incomplete: {', '.join(sorted(missing))} missing")
    steps = {"step": state["step"], "progress.step": state["progress"].get("step")}
    if re.fullmatch(STEP_FOLDER, path.name):
        steps["the folder's name"] = int(path.name.removeprefix("step_"))
    if len(set(steps.values())) > 1:
        found = ", ".join(f"{where} says {step}" for where, step in steps.items())
        raise ValueError(f"{path / 'state.json'} does not belong to this checkpoint: {found}")
    return state


def _read_tensors(path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"checkpoint file {path} is missing or cut off: {error}") from error
    _verify(path, state)
    return tensors


def _verify_tokenizer(path: Path, state: Mapping[str, Any]) -> Path | None:
    """The checkpoint's tokenizer.json, None if it has none."""
    if TOKENIZER_FILE not in state["sha256"]:
        return None
    _verify(path / TOKENIZER_FILE, state)
    return path / TOKENIZER_FILE


def _verify(path: Path, state: Mapping[str, Any]) -> None:
    try:
        found = _sha256(path)
    except OSError as error:
        raise ValueError(f"checkpoint file {path} is missing or cannot be read: {error.strerror}") from error
    if found != state["sha256"][path.name]:
        raise ValueError(f"checkpoint file {path} is not what was saved: its SHA-256 differs from state.json's")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    """Removes a checkpoint; one that is removed halfway no longer has a checkpoint's name."""
    doomed = path.with_name(f".{path.name}.old")
    os.rename(path, doomed)
    shutil.rmtree(doomed)
