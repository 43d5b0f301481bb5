"""Files of tensors: shards, headers, broken files, folders that appear whole."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from normstream.checkpoints.tensors import (
    copy_side_files,
    new_folder,
    read_header,
    read_metadata,
    read_tensors,
    weight_files,
    write_tensors,
)

TENSORS = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor([7])}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_one_file(tmp_path: Path) -> None:
    files = write_tensors(tmp_path, TENSORS, {"convention": "plain"})
    assert [path.name for path in files] == ["model.safetensors"]
    assert_same(load_file(files[0]), TENSORS)
    assert_same(read_tensors(tmp_path), TENSORS)
    assert read_metadata(tmp_path) == {"format": "pt", "convention": "plain"}


def test_shards_and_their_index(tmp_path: Path) -> None:
    files = write_tensors(tmp_path, TENSORS, {"k": "1"}, max_shard_bytes=24)
    assert [path.name for path in files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 4 + 5 * 2 + 8
    assert index["weight_map"] == {"b": files[0].name, "a": files[1].name, "c": files[1].name}
    assert_same(read_tensors(tmp_path), TENSORS)
    assert read_metadata(tmp_path)["k"] == "1"


def test_header_is_the_library_s(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert header.shapes == {"a": (5,), "b": (2, 3), "c": (1,)}
    assert header.dtypes == {"a": "BF16", "b": "F32", "c": "I64"}


def test_views_of_one_storage(tmp_path: Path) -> None:
    fused = torch.randn(4, 3)
    parts = {"q": fused[:2], "k": fused[2:], "tied": fused, "turned": fused.T, "again": fused}
    write_tensors(tmp_path, parts)
    assert_same(read_tensors(tmp_path), parts)


def test_never_overwritten(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    with pytest.raises(ValueError, match="has weights already"):
        write_tensors(tmp_path, TENSORS)
    with pytest.raises(ValueError, match="exists already"), new_folder(tmp_path):
        pass


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with new_folder(tmp_path / "out") as folder:
            write_tensors(folder, TENSORS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "deep" / "out") as folder:
        write_tensors(folder, TENSORS)
        assert not (tmp_path / "deep" / "out").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert_same(read_tensors(tmp_path / "deep" / "out"), TENSORS)


def test_side_files(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    write_tensors(source, TENSORS, max_shard_bytes=24)
    for name in ("config.json", "tokenizer.json", "vocab.txt", "modeling.py", "training_args.bin"):
        (source / name).write_text(name)
    (target / "config.json").write_text("new")
    copy_side_files(source, target)
    assert {path.name for path in target.iterdir()} == {"config.json", "tokenizer.json", "vocab.txt"}
    assert (target / "config.json").read_text() == "new"


@pytest.mark.parametrize("kept", [4, 20, -1])
def test_cut_off_file(tmp_path: Path, kept: int) -> None:
    (path,) = write_tensors(tmp_path, TENSORS)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is cut off"):
        read_tensors(tmp_path)


def test_file_with_something_behind_it(tmp_path: Path) -> None:
    (path,) = write_tensors(tmp_path, TENSORS)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match="longer than it should be"):
        read_tensors(tmp_path)


BROKEN_HEADERS = [
    b"not json",
    b"[1]",
    b'{"a": {"dtype": "F32"}}',
    b'{"a": 1}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "x"]}}',
    b'{"__metadata__": 1}',
    b'{"a": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("header", BROKEN_HEADERS)
def test_broken_header(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="broken header"):
        read_tensors(tmp_path)


def test_overlapping_offsets(tmp_path: Path) -> None:
    """The size is right, the offsets are not: the library's own check has the last word."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ValueError, match="cannot read"):
        read_tensors(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights in"):
        read_tensors(tmp_path)
    assert weight_files(tmp_path) == []


def write_shards(folder: Path) -> dict:
    write_tensors(folder, TENSORS, max_shard_bytes=24)
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_shard_that_is_missing(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"not there: model-00002-of-00002\.safetensors"):
        read_tensors(tmp_path)


def test_second_shard_is_cut_off(tmp_path: Path) -> None:
    write_shards(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is cut off"):
        read_tensors(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    index, first = write_shards(tmp_path), "model-00001-of-00002.safetensors"
    for change, message in (
        ({"a": first}, "says that 'a' is in model-00001.*but it is in model-00002"),
        ({"d": first}, "says that 'd' is in model-00001.*but it is in no file"),
        ({"a": "../secret.safetensors"}, "outside its folder"),
    ):
        changed = {**index, "weight_map": {**index["weight_map"], **change}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            read_tensors(tmp_path)
    del index["weight_map"]["a"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not list 'a'"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        read_tensors(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match="'a' is in several files"):
        read_tensors(tmp_path)


class Attack:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_malicious_bin_runs_nothing(tmp_path: Path, legacy: bool) -> None:
    path, proof = tmp_path / "pytorch_model.bin", tmp_path / "proof"
    torch.save({"a": torch.ones(2), "b": Attack(proof)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .*holds more than tensors.*nothing of it was run"):
        read_tensors(tmp_path)
    assert not proof.exists()


def test_malicious_plain_pickle_runs_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(proof)))
    with pytest.raises(ValueError, match="nothing of it was run"):
        read_tensors(tmp_path)
    assert not proof.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_bin(tmp_path: Path, legacy: bool) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert_same(read_tensors(tmp_path), TENSORS)
    assert read_metadata(tmp_path) == {}


def test_bin_shards(tmp_path: Path) -> None:
    for i, names in enumerate((("a",), ("b", "c"))):
        torch.save({name: TENSORS[name] for name in names}, tmp_path / f"pytorch_model-{i}.bin")
    weight_map = {"a": "pytorch_model-0.bin", "b": "pytorch_model-1.bin", "c": "pytorch_model-1.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(read_tensors(tmp_path), {name: TENSORS[name] for name in "abc"})


@pytest.mark.parametrize("content", [[torch.ones(1)], {"state_dict": {"a": torch.ones(1)}}, {"epoch": 3}])
def test_bin_that_is_no_state_dict(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is no state dict"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 10, 400, -30])
def test_cut_off_bin(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        read_tensors(tmp_path)
