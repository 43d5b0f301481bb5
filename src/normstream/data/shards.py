"""Ready token shards: ``.npy`` files, and ``.bin`` files with a small header.

A ``.bin`` shard is a header of 32 bytes followed by ``count`` little-endian tokens, documents each closed by ``eot``:

====== ======= ==========================================
offset type    content
====== ======= ==========================================
0      8 bytes magic, ``NSTOKENS``
8      uint32  version, 1
12     uint32  bytes per token: 2 (uint16) or 4 (uint32)
16     uint32  vocab_size of the tokenizer
20     uint32  eot, the id of end-of-text
24     uint64  count, the number of tokens
====== ======= ==========================================

A ``.npy`` shard is a 1-D integer array; it does not say which tokenizer made it. Both are memory-mapped.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHARD_SUFFIXES = (".npy", ".bin")
MAGIC = b"NSTOKENS"
VERSION = 1
HEADER = struct.Struct("<8s4IQ")


@dataclass(frozen=True)
class Shard:
    """Tokens (1-D, integer) and what the file says of their tokenizer; None where it does not say.

    >>> Shard(np.array([1, 2, 3]), None, None).tokens.size
    3
    """

    tokens: np.ndarray
    vocab_size: int | None
    eot: int | None


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest token type that a vocabulary fits: uint16 or uint32, little-endian.

    >>> token_dtype(257)
    dtype('uint16')
    """
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(path: Path | str, tokens: np.ndarray, *, vocab_size: int, eot: int) -> None:
    """Writes a ``.bin`` shard, under a temporary name first, so that the file is complete or absent.

    Raises ValueError if tokens is not a 1-D integer array or a token or eot lies outside the vocabulary.

    >>> folder = getfixture("tmp_path")
    >>> write_shard(folder / "a.bin", np.array([7, 8, 256]), vocab_size=257, eot=256)
    >>> read_shard(folder / "a.bin").tokens.tolist()
    [7, 8, 256]
    """
    path = Path(path)
    _check_kind(tokens, "tokens")
    if not 0 <= eot < vocab_size:
        raise ValueError(f"eot must lie in [0, vocab_size) = [0, {vocab_size}), got {eot}")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise ValueError(f"tokens must lie in [0, {vocab_size}), got [{tokens.min()}, {tokens.max()}]")
    dtype = token_dtype(vocab_size)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, dtype.itemsize, vocab_size, eot, tokens.size))
            file.write(np.ascontiguousarray(tokens, dtype).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_shard(path: Path | str) -> Shard:
    """A ``.bin`` or ``.npy`` shard, memory-mapped and read-only.

    Raises ValueError if the file cannot be read, is damaged or truncated, or is no shard.

    >>> np.save(getfixture("tmp_path") / "a.npy", np.array([1, 2], np.uint16))
    >>> read_shard(getfixture("tmp_path") / "a.npy").vocab_size is None
    True
    """
    path = Path(path)
    try:
        return _read_npy(path) if path.suffix.lower() == ".npy" else _read_bin(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def _read_npy(path: Path) -> Shard:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole .npy array of numbers: {error}") from error
    _check_kind(tokens, str(path))
    return Shard(tokens, None, None)


def _read_bin(path: Path) -> Shard:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(f"{path} is not a token shard: expected it to start with {MAGIC!r}, got {header[:8]!r}")
    _, version, itemsize, vocab_size, eot, count = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{path} is a token shard of version {version}; this normstream reads version {VERSION}")
    if itemsize not in (2, 4) or not eot < vocab_size:
        raise ValueError(f"{path} has a damaged header: {itemsize} bytes a token, vocab_size {vocab_size}, eot {eot}")
    if size != HEADER.size + count * itemsize:
        raise ValueError(
            f"{path} is truncated or damaged: {count} tokens of {itemsize} bytes make {HEADER.size + count * itemsize} "
            f"bytes with the header, but the file has {size}"
        )
    if count == 0:
        raise ValueError(f"{path} holds no tokens")
    return Shard(np.memmap(path, f"<u{itemsize}", "r", HEADER.size, (count,)), vocab_size, eot)


def _check_kind(tokens: np.ndarray, what: str) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{what}: expected a 1-D array of integers, got shape {tokens.shape} of {tokens.dtype}")
