"""Writing a changed model as a folder that plain transformers loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from normstream.checkpoints.source import LoadedModel, quiet_transformers
from normstream.checkpoints.tensors import (
    SHARD_BYTES,
    copy_side_files,
    new_folder,
    write_tensors,
)


def save_model(
    loaded: LoadedModel,
    out: Path,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a new folder ``out``, which appears whole or not at all; see ``write_model``.

    Raises:
        ValueError: if ``out`` exists; and what ``write_model`` raises.
    """
    with new_folder(out) as folder:
        write_model(loaded, folder, metadata, max_shard_bytes)


def write_model(
    loaded: LoadedModel,
    folder: Path,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model of transformers with its config, tokenizer and generation settings into an empty folder.

    Tensors have the names and layouts of the family's files (single experts, say), each tied one once.

    Raises:
        ValueError: for a model of normstream, which has checkpoints of its own.
    """
    if loaded.is_ours:
        raise ValueError(f"{loaded.source} is a run of normstream; this works on models of transformers")
    model: Any = loaded.model
    with quiet_transformers():
        model.config.architectures = [type(model).__name__]
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.save_pretrained(folder)
        write_tensors(folder, file_tensors(model), metadata, max_shard_bytes)
        if loaded.folder is not None:
            copy_side_files(loaded.folder, folder)
        if model.can_generate() and not (folder / "generation_config.json").exists():
            model.generation_config.save_pretrained(folder)


def file_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of a model of transformers by the names that its files have, each tied one once."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = model._keys_to_ignore_on_save or ()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(tensors, model)))
