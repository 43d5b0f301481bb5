"""Shards against a header written by hand, and every way in which a file can be damaged."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normstream.data import read_shard, write_shard


def by_hand(tokens: list[int], itemsize: int = 2, vocab_size: int = 257, eot: int = 256) -> bytes:
    header = b"NSTOKENS" + b"".join(number.to_bytes(4, "little") for number in (1, itemsize, vocab_size, eot))
    body = b"".join(token.to_bytes(itemsize, "little") for token in tokens)
    return header + len(tokens).to_bytes(8, "little") + body


def test_the_bytes_of_a_shard(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.array([1, 255, 256]), vocab_size=257, eot=256)
    assert (tmp_path / "a.bin").read_bytes() == by_hand([1, 255, 256])
    write_shard(tmp_path / "b.bin", np.array([1, 70000]), vocab_size=70001, eot=0)
    assert (tmp_path / "b.bin").read_bytes() == by_hand([1, 70000], 4, 70001, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "b.bin"]


def test_reads_a_shard_written_by_hand(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(by_hand([3, 1, 256]))
    shard = read_shard(tmp_path / "a.bin")
    assert (shard.tokens.tolist(), shard.vocab_size, shard.eot) == ([3, 1, 256], 257, 256)
    assert isinstance(shard.tokens, np.memmap)
    assert not shard.tokens.flags.writeable


@given(st.lists(st.integers(0, 99_999), min_size=1, max_size=50))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, tokens: list[int]) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.bin"
    write_shard(path, np.array(tokens), vocab_size=100_000, eot=5)
    assert read_shard(path).tokens.tolist() == tokens


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", ">u2"])
def test_npy(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 1, 2], dtype))
    shard = read_shard(tmp_path / "a.npy")
    assert (shard.tokens.tolist(), shard.vocab_size, shard.eot) == ([3, 1, 2], None, None)
    assert isinstance(shard.tokens, np.memmap)


WHOLE = by_hand([1, 2, 3])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a token shard"),
        (WHOLE[:31], "not a token shard"),
        (b"X" + WHOLE[1:], "not a token shard: expected it to start with b'NSTOKENS', got b'XSTOKENS'"),
        (WHOLE[:8] + struct.pack("<I", 2) + WHOLE[12:], "version 2; this normstream reads version 1"),
        (by_hand([1], itemsize=3), "damaged header: 3 bytes a token"),
        (by_hand([1], eot=257), "damaged header"),
        (WHOLE[:-1], "3 tokens of 2 bytes make 38 bytes with the header, but the file has 37"),
        (WHOLE + b"\0", "but the file has 39"),
        (WHOLE[:24] + struct.pack("<Q", 1 << 60) + WHOLE[32:], "truncated or damaged"),
        (by_hand([]), "holds no tokens"),
    ],
)
def test_damaged_bin(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_shard(path)


def test_damaged_npy(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100))
    whole = path.read_bytes()
    for content in (b"", whole[:7], whole[:100], whole[:-1], b"text" * 50):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a whole .npy array"):
            read_shard(path)


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.int64), np.zeros(3), np.array([True])])
def test_arrays_that_are_no_tokens(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match="expected a 1-D array of integers"):
        read_shard(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="expected a 1-D array of integers"):
        write_shard(tmp_path / "a.bin", array, vocab_size=10, eot=0)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"not a whole .npy array"):
        read_shard(tmp_path / "a.npy")


def test_missing_shard(tmp_path: Path) -> None:
    for name in ("a.npy", "a.bin"):
        with pytest.raises(ValueError, match=r"cannot read .*No such file"):
            read_shard(tmp_path / name)


@pytest.mark.parametrize(("tokens", "eot"), [([10], 0), ([-1], 0), ([1], 10), ([1], -1)])
def test_tokens_outside_the_vocabulary(tmp_path: Path, tokens: list[int], eot: int) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        write_shard(tmp_path / "a.bin", np.array(tokens), vocab_size=10, eot=eot)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_the_old_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(WHOLE)

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_shard(path, np.array([7]), vocab_size=257, eot=256)
    assert path.read_bytes() == WHOLE
    assert list(tmp_path.iterdir()) == [path]
