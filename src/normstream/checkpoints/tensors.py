"""The tensors of a checkpoint folder: safetensors, one file or shards with an index; ``.bin`` files are only read.

    model.safetensors                   one file, or
    model-00001-of-00002.safetensors    shards, and
    model.safetensors.index.json        which of them holds which tensor

A file's header is compared with its size, and an index with its shards, before a tensor is read. Nothing that is read
can run code: a ``.bin`` file is a pickle, of which only tensors and plain containers are unpacked.
"""

import json
import os
import pickle
import re
import shutil
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from normstream.training.files import read_json, sync, write_json

STEMS = ("model.safetensors", "pytorch_model.bin")
"""Names of a whole file, in the order in which they are looked for; shards have an index, ``<name>.index.json``."""
SHARD_BYTES = 5_000_000_000
"""Largest shard that is written, unless one tensor alone is larger."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HEADER_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""The dtypes of ``FLOATS`` in the words of safetensors."""
SIDE_FILES = (".json", ".txt", ".model", ".jinja")
"""Suffixes of what lies beside the weights: tokenizer, vocabulary, generation settings."""


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file."""

    metadata: dict[str, str]
    """Strings that the writer noted."""
    dtypes: dict[str, str]
    """Dtype by tensor, in the format's words: F32, BF16, I8 ..."""
    shapes: dict[str, tuple[int, ...]]
    """Shape by tensor."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's tensors, one or its shards in order; empty if there are none.

    Raises:
        ValueError: if the index names a shard that is not there, or a file outside the folder.

    >>> weight_files(Path("no/such/folder"))
    []
    """
    for stem in STEMS:
        if (folder / stem).is_file():
            return [folder / stem]
        index = folder / f"{stem}.index.json"
        if index.is_file():
            shards = [folder / name for name in sorted(set(_weight_map(index).values()))]
            if absent := [shard.name for shard in shards if not shard.is_file()]:
                raise ValueError(f"{index} names shards that are not there: {', '.join(absent)}; fetch them again")
            return shards
    return []


def read_header(path: Path) -> Header:
    """Reads the header of a safetensors file and compares it with the file's size.

    Raises:
        ValueError: naming the file if it is cut off, too long or not in this format.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ValueError(f"{path} is cut off or no safetensors file: {size:,} bytes are too few for its header")
        text = file.read(length)
    try:
        entries = json.loads(text)
        metadata = dict(entries.pop("__metadata__", {}))
        expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        dtypes = {name: entry["dtype"] for name, entry in entries.items()}
    except (ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} has a broken header ({error}); fetch the file again") from error
    if expected != size:
        what = "cut off" if size < expected else "longer than it should be"
        raise ValueError(f"{path} is {what}: {size:,} bytes, its header says {expected:,}; fetch the file again")
    return Header(metadata, dtypes, shapes)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, or of one ``.safetensors`` or ``.bin`` file, on the CPU.

    Every header and index is checked before the first tensor is read.

    Raises:
        ValueError: if there are no weights; if a file is cut off, broken, or holds something else than tensors; if
            an index and its shards do not agree.
    """
    files = [folder] if folder.is_file() else weight_files(folder)
    if not files:
        raise ValueError(f"no weights in {folder}: expected {' or '.join(STEMS)}, or an index and its shards")
    is_safe = files[0].suffix == ".safetensors"
    if is_safe:
        _check_shards(folder, {path: tuple(read_header(path).shapes) for path in files})
    parts = {path: _load_safetensors(path) if is_safe else _load_bin(path) for path in files}
    if not is_safe:
        _check_shards(folder, {path: tuple(part) for path, part in parts.items()})
    return {name: tensor for part in parts.values() for name, tensor in part.items()}


def stored_dtype(folder: Path) -> torch.dtype:
    """The narrowest float dtype that holds all tensors of a folder exactly; float32 if there are no weights.

    Of safetensors only the headers are read.
    """
    found: set[torch.dtype] = set()
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            found |= {HEADER_DTYPES[name] for name in read_header(path).dtypes.values() if name in HEADER_DTYPES}
        else:
            found |= {tensor.dtype for tensor in read_tensors(path).values() if tensor.dtype in FLOATS}
    return reduce(torch.promote_types, found) if found else torch.float32


def read_metadata(folder: Path) -> dict[str, str]:
    """The metadata of a folder's safetensors files (or of one file); empty for ``.bin`` files."""
    files = [folder] if folder.is_file() else weight_files(folder)
    headers = [read_header(path) for path in files if path.suffix == ".safetensors"]
    return {key: value for header in headers for key, value in header.metadata.items()}


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes tensors into an existing folder: one file, or shards and an index where one would be too large.

    Tensors stay in their order. ``metadata`` goes into the header of every file.

    Returns:
        The files, without the index.

    Raises:
        ValueError: if the folder has weights already.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> [path.name for path in write_tensors(folder, {"a": torch.ones(4), "b": torch.ones(4)}, max_shard_bytes=16)]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    >>> read_tensors(folder)["b"].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if existing := [path.name for path in folder.iterdir() if _is_weights(path)]:
        raise ValueError(f"{folder} has weights already ({existing[0]}); choose another folder")
    shards = _split(tensors, max_shard_bytes)
    stem, count = STEMS[0], len(shards)
    names = [stem] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        (folder / name).touch()
        mode = (folder / name).stat().st_mode
        _save_file(_separate(shard), folder / name, {"format": "pt", **(metadata or {})})
        (folder / name).chmod(mode)  # safetensors makes files that only their owner can read
        sync(folder / name)
    if count > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(folder / f"{stem}.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [folder / name for name in names]


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder under a temporary name that gets its own when the block ends, and vanishes if the block fails.

    Raises:
        ValueError: if ``path`` exists, before and after the block: nothing is ever overwritten.

    >>> import tempfile
    >>> with new_folder(Path(tempfile.mkdtemp()) / "model") as folder:
    ...     _ = (folder / "config.json").write_text("{}")
    >>> folder.exists(), (folder.parent / "model" / "config.json").exists()
    (False, True)
    """
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        refuse_existing(path)
        os.rename(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_existing(path: Path) -> None:
    """Raises ValueError if ``path`` exists, or a file stands where a folder above it would be."""
    if os.path.lexists(path):  # also a link that leads nowhere
        raise ValueError(f"{path} exists already and is not overwritten; choose another folder with --out")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{path} cannot be made: {above} is no folder that can be written to")


def copy_side_files(source: Path, target: Path) -> None:
    """Copies what lies beside a folder's weights and config: tokenizer, vocabulary, generation settings.

    What is in ``target`` already stays. Nothing is copied that a checkpoint could run: no ``.py``, no pickle.
    """
    for path in sorted(source.iterdir()):
        other = target / path.name
        if path.is_file() and path.suffix in SIDE_FILES and not _is_weights(path) and not other.exists():
            shutil.copyfile(path, other)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind if it has none.

    >>> first_line(ValueError("cut off\\nat byte 7")), first_line(EOFError())
    ('cut off', 'EOFError')
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _is_weights(path: Path) -> bool:
    return re.fullmatch(r"(model|pytorch_model)\S*\.(safetensors|bin)(\.index\.json)?", path.name) is not None


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files")
    if outside := [name for name in weight_map.values() if Path(name).name != name]:
        raise ValueError(f"{index} names a file outside its folder: {outside[0]!r}")
    return weight_map


def _check_shards(folder: Path, found: Mapping[Path, tuple[str, ...]]) -> None:
    """Raises ValueError unless every tensor is in one file only, the one that the index says."""
    counts: dict[str, list[str]] = {}
    for path, names in found.items():
        for name in names:
            counts.setdefault(name, []).append(path.name)
    if twice := [name for name, files in counts.items() if len(files) > 1]:
        raise ValueError(f"{folder}: tensor {twice[0]!r} is in several files: {', '.join(counts[twice[0]])}")
    stem = STEMS[0] if next(iter(found)).suffix == ".safetensors" else STEMS[1]
    index = folder / f"{stem}.index.json"
    if stem in (path.name for path in found) or not index.is_file():
        return
    weight_map = _weight_map(index)
    for name, file in weight_map.items():
        if counts.get(name) != [file]:
            where = counts.get(name, ["no file"])[0]
            raise ValueError(f"{index} says that {name!r} is in {file}, but it is in {where}; fetch the model again")
    if extra := [name for name in counts if name not in weight_map]:
        raise ValueError(f"{index} does not list {extra[0]!r}, which is in {counts[extra[0]][0]}")


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # SafetensorError, or KeyError for a dtype that torch does not have
        raise ValueError(f"cannot read {path}: {error}; fetch the file again") from error


def _load_bin(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles that it then refuses
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "nsupported" in line), first_line(error))
        raise ValueError(
            f"{path} is cut off or holds more than tensors, so nothing of it was run or loaded ({reason.strip()}); "
            "ask for the model as .safetensors"
        ) from error
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError ... for broken files
        raise ValueError(f"cannot read {path}: {first_line(error)}; fetch the file again") from error
    named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not named or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"{path} is no state dict: expected tensors by name and nothing else")
    return dict(tensors)


def _save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # what it makes of the system's errors
        raise OSError(f"cannot write {path}: {error}; make room there, or make it writable, and try again") from error


def _split(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards, room = [{}], max_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, none of which shares its storage with another (safetensors refuses those)."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if pointer in storages else tensor
        storages.add(pointer)
    return separate
