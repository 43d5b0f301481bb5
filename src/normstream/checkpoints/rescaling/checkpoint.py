"""Rescaling a checkpoint: from a source to a new folder that plain transformers loads, with the mark and the report."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normstream.checkpoints.precise import answer, difference
from normstream.checkpoints.rescaling.report import RescaleReport
from normstream.checkpoints.rescaling.rescale import HEADROOM, MARK, TOLERANCE, Rescaled, check_numbers, rescale
from normstream.checkpoints.save import write_model
from normstream.checkpoints.source import Attention, LoadedModel, load_source, quiet_transformers
from normstream.checkpoints.tensors import new_folder, read_metadata, refuse_existing, stored_dtype, weight_files
from normstream.inspect.inputs import make_inputs
from normstream.training.files import read_json, write_json

REPORT_FILE = "rescale.json"


def rescale_checkpoint(
    source: str | Path,
    out: Path | None,
    *,
    k: int | None = None,
    headroom: float = HEADROOM,
    text: str | None = None,
    n_tokens: int = 128,
    tolerance: float = TOLERANCE,
    attention: Attention = "eager",
    trust_remote_code: bool = False,
    model_type: str | None = None,
    seed: int = 0,
) -> RescaleReport:
    """Writes a rescaled copy of a model that plain transformers loads, and verifies it, before and after writing.

    A tensor keeps the dtype that it is stored in, unless that would change its new value (zero-centred gains in
    bfloat16; weights that would become subnormal in fp16): it is then stored in float32, and the config says float32.

    Args:
        source: folder, config.json or hub name.
        out: folder to write; it must not exist. None writes nothing.
        k: stream / 2^k; None takes the smallest k that leaves ``headroom`` on the text.
        headroom: 65,504 over the largest |h|.
        text: what the peaks and the logits are measured on; None for random tokens.
        n_tokens: most tokens of it.
        tolerance: largest error of the float64 logits, over the largest logit.
        attention: attention code of transformers.
        trust_remote_code: whether Python files of the checkpoint may run.
        model_type: type for a config.json that does not say it, as ``bert``.
        seed: for random tokens, and for weights where there are none.

    Raises:
        ValueError: if ``out`` exists; if the model was rescaled before, is quantised or is normstream's own; if its
            stream is small enough; if its function cannot be kept, or not by a config, saying why.
    """
    check_numbers(k, headroom, tolerance)
    if out is not None:
        refuse_existing(out)
    loaded = load_source(source, torch.float32, attention, seed, trust_remote_code, model_type)
    if loaded.is_ours:
        raise ValueError(f"{source} is a run of normstream; this works on models of transformers")
    if loaded.folder is not None and weight_files(loaded.folder) and MARK in read_metadata(loaded.folder):
        raise ValueError(f"{source} was rescaled already; rescale the original, with a larger k")
    with quiet_transformers():
        inputs = make_inputs(loaded.model, text, loaded.tokenizer, n_tokens, seed)
        result = rescale(loaded.model, inputs, k=k, headroom=headroom, tolerance=tolerance, source=str(source))
        report = replace(result.report, notes=(*result.report.notes, *loaded.notes))
        if out is not None:
            with new_folder(out) as folder:
                write(result, loaded, folder)
                write_json(folder / REPORT_FILE, report.to_json())
                _check_written(result, inputs, folder, tolerance)
    return report


def write(result: Rescaled, loaded: LoadedModel, folder: Path) -> None:
    """Writes a rescaled model into an empty folder; ``loaded`` says where it came from."""
    dtype = torch.float32 if loaded.folder is None else stored_dtype(loaded.folder)
    model: Any = copy.deepcopy(result.model)
    is_mixed = _store_in(model, dtype)
    write_model(replace(loaded, model=model), folder, {MARK: str(result.plan.k)})
    if is_mixed:
        write_json(folder / "config.json", read_json(folder / "config.json") | {"dtype": "float32"})


def _store_in(model: nn.Module, dtype: torch.dtype) -> bool:
    """Casts what the dtype holds exactly; whether there was more than that."""
    is_mixed = False
    for parameter in model.parameters():
        stored = parameter.detach().to(dtype)
        if torch.equal(stored.to(parameter.dtype), parameter.detach()):
            parameter.data = stored
        else:
            is_mixed = True
    return is_mixed


def _check_written(result: Rescaled, inputs: dict[str, Any], folder: Path, tolerance: float) -> None:
    """Loads a folder as anybody would; ValueError unless it computes the same."""
    model: Any = result.model
    kind, attention = type(model), model.config._attn_implementation
    written = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    found = difference(answer(written, inputs), answer(model, inputs))
    if not found <= tolerance:
        raise ValueError(
            f"transformers loads the written model as another function (logits differ by {found:.1e} of the largest): "
            f"{kind.__name__} does not save and load all that it computes with; nothing was kept"
        )
