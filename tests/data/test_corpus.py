"""load_data from end to end, on corpora small enough to write down."""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normstream.data import ByteTokenizer, Data, DataConfig, load_data, load_whole, train_bpe, write_shard


def load(source: Path | str, **options: Any) -> Data:
    return load_data(DataConfig(source=str(source), **{"seq_len": 4, **options}))


def folder_of(path: Path, n_files: int = 40) -> Path:
    for i in range(n_files):
        (path / f"{i}.txt").write_text(f"text number {i}, text number {i}")
    return path


def test_single_file_is_split_into_head_and_tail(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789abcdefghij")
    data = load(tmp_path / "a.txt", validation_fraction=0.25)
    assert data.train.tokens.tolist() == [*b"0123456789abcde", 256]
    assert data.validation.tokens.tolist() == [*b"fghij", 256]
    assert (data.train.n_bytes, data.validation.n_bytes) == (15, 5)
    assert data.vocab_size == 257


def test_files_are_split_by_the_hash_of_their_path(tmp_path: Path) -> None:
    data = load(folder_of(tmp_path), validation_fraction=0.2)
    names = sorted(path.name for path in tmp_path.iterdir())
    below = [n for n in names if int.from_bytes(hashlib.sha256(n.encode()).digest()[:8], "big") < 0.2 * 2**64]
    expected = b"".join((tmp_path / name).read_bytes() for name in below)
    assert bytes(t for t in data.validation.tokens.tolist() if t < 256) == expected
    assert data.validation.tokens.tolist().count(256) == len(below)
    assert data.train.n_bytes + data.validation.n_bytes == sum(len((tmp_path / n).read_bytes()) for n in names)


def test_corpus_hash_is_of_the_text_and_the_split(tmp_path: Path) -> None:
    first = load(folder_of(tmp_path)).corpus_hash
    assert len(first) == 64
    assert load(tmp_path, seq_len=8, tokenizer="bpe:300").corpus_hash == first
    assert load(tmp_path, validation_fraction=0.5).corpus_hash != first
    (tmp_path / "0.txt").write_text("another text")
    assert load(tmp_path).corpus_hash != first


def test_bpe_is_trained_on_the_training_split_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 90 + "cd" * 10)
    data = load(tmp_path / "a.txt", tokenizer="bpe:258", validation_fraction=0.1)
    assert len(data.tokenizer.encode("ab")) == 1
    assert len(data.tokenizer.encode("cd")) == 2
    assert data.validation.n_bytes == 20
    assert data.validation.bytes_per_token == 20 / 21


def test_saved_bpe_gives_the_same_data(tmp_path: Path) -> None:
    trained = load(folder_of(tmp_path), tokenizer="bpe:280")
    path = tmp_path.parent / f"{tmp_path.name}.json"
    path.write_text(str(trained.tokenizer.to_json()), "utf-8")
    again = load(tmp_path, tokenizer=str(path))
    assert np.array_equal(again.train.tokens, trained.train.tokens)
    assert np.array_equal(again.validation.tokens, trained.validation.tokens)
    assert again.vocab_size == trained.vocab_size


def test_wrong_utf8_is_raw_for_bytes_and_warned_of_once_for_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff" * 100)
    assert load(tmp_path / "a.txt").train.tokens[0] == 255
    with pytest.warns(UserWarning, match="2 of 2 documents are not valid UTF-8") as caught:
        load(tmp_path / "a.txt", tokenizer="bpe:257")
    assert len(caught) == 1


def test_options_reach_both_splits(tmp_path: Path) -> None:
    data = load(folder_of(tmp_path), cross_document_attention=True, positions_per_document=True)
    for packed in (data.train, data.validation):
        assert packed.seq_len == 4
        assert packed.sample(0).documents_BT is None
        assert packed.sample(0).positions_BT is not None


def test_a_corpus_shorter_than_one_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    with pytest.raises(ValueError, match=r"gives 6 training tokens and 6 validation tokens, .* needs 7 of each"):
        load(tmp_path / "a.txt", seq_len=6, validation_fraction=0.5)
    assert len(load(tmp_path / "a.txt", seq_len=5, validation_fraction=0.5).validation) == 1
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="gives 0 training tokens and 0 validation tokens"):
        load(tmp_path / "empty.txt")


def test_a_wrong_tokenizer_is_found_before_the_source_is_read() -> None:
    with pytest.raises(ValueError, match="unknown tokenizer 'byte'; did you mean 'bytes'"):
        load("nowhere.txt", tokenizer="byte")
    with pytest.raises(ValueError, match="expected bpe:N"):
        load("nowhere.txt", tokenizer="bpe:10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"validation_fraction": 0.0}, "between 0 and 1, got 0.0"),
        ({"validation_fraction": 1.0}, "between 0 and 1, got 1.0"),
        ({"max_bytes": 0}, "max_bytes must be at least 1, got 0"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


DOCUMENTS = [*b"first", 256, *b"second", 256, *b"third", 256]


def test_single_shard_is_split_where_a_document_ends(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.array(DOCUMENTS), vocab_size=257, eot=256)
    np.save(tmp_path / "a.npy", np.array(DOCUMENTS, np.uint16))
    for name in ("a.bin", "a.npy"):
        data = load(tmp_path / name, validation_fraction=0.2)
        assert data.train.tokens.tolist() == [*b"first", 256, *b"second", 256]
        assert data.validation.tokens.tolist() == [*b"third", 256]
        assert (data.train.n_bytes, data.validation.n_bytes) == (11, 5)
        assert isinstance(data.train.tokens, np.memmap)
    assert load(tmp_path / "a.bin").corpus_hash == load(tmp_path / "a.npy").corpus_hash
    assert load(tmp_path / "a.bin").corpus_hash != load(tmp_path / "a.bin", validation_fraction=0.6).corpus_hash


def test_shard_without_end_of_text_is_cut_anywhere(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(20))
    data = load(tmp_path / "a.npy", validation_fraction=0.5)
    assert data.train.tokens.tolist() == list(range(10))
    assert data.validation.tokens.tolist() == list(range(10, 20))


def test_shards_are_split_by_file(tmp_path: Path) -> None:
    for i in range(3):
        write_shard(tmp_path / f"{i}.bin", np.full(10, i), vocab_size=257, eot=256)
    data = load(tmp_path, validation_fraction=0.01)
    lowest = min(range(3), key=lambda i: hashlib.sha256(f"{i}.bin".encode()).digest())
    assert data.validation.tokens.tolist() == [lowest] * 10
    assert data.train.tokens.tolist() == [i for i in range(3) if i != lowest for _ in range(10)]


def test_shards_of_a_trained_tokenizer(tmp_path: Path) -> None:
    text = b"low lower lowest " * 20
    tokenizer = train_bpe([text], 270)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    tokens = np.array([*tokenizer.encode(text.decode()), tokenizer.eot])
    write_shard(tmp_path / "a.bin", tokens, vocab_size=tokenizer.vocab_size, eot=tokenizer.eot)
    data = load(tmp_path / "a.bin", tokenizer=str(tmp_path / "tokenizer.json"), validation_fraction=0.2)
    assert data.train.n_bytes + data.validation.n_bytes == len(text)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("bytes", "made by another tokenizer: its vocab_size is 300 and its end-of-text 0, those of tokenizer 'bytes'"),
        ("bpe:300", "is tokenized already: give its tokenizer, not 'bpe:300'"),
    ],
)
def test_shards_of_another_tokenizer(tmp_path: Path, tokenizer: str, message: str) -> None:
    write_shard(tmp_path / "a.bin", np.arange(20), vocab_size=300, eot=0)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path / "a.bin", tokenizer=tokenizer)


@pytest.mark.parametrize(("token", "shown"), [(257, "0 to 257"), (-1, "-1 to 0")])
def test_token_outside_the_vocabulary(tmp_path: Path, token: int, shown: str) -> None:
    tokens = np.zeros(50, np.int64)
    tokens[30] = token
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises(ValueError, match=f"token ids from {shown}, but tokenizer 'bytes' has vocab_size 257"):
        load(tmp_path / "a.npy")


def test_folder_of_shards_and_texts(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(20))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ValueError, match=r"mixes token shards \(a.npy\) with other files \(b.txt\)"):
        load(tmp_path)


def test_load_whole_reads_every_document_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    packed = load_whole(DataConfig(source=str(tmp_path), seq_len=4), ByteTokenizer())
    assert packed.tokens.tolist() == [*b"a.txt", 256, *b"b.txt", 256]
    assert packed.n_bytes == 10
    with pytest.raises(ValueError, match="gives 12 tokens, and one sequence needs 13"):
        load_whole(DataConfig(source=str(tmp_path), seq_len=12), ByteTokenizer())


def test_load_whole_of_shards(tmp_path: Path) -> None:
    for i in range(2):
        write_shard(tmp_path / f"{i}.bin", np.array([i, i, i, 256]), vocab_size=257, eot=256)
    packed = load_whole(DataConfig(source=str(tmp_path), seq_len=4), ByteTokenizer())
    assert packed.tokens.tolist() == [0, 0, 0, 256, 1, 1, 1, 256]
    assert packed.n_bytes == 6


def test_default_corpus_is_the_same_every_time() -> None:
    first, second = load_data(DataConfig()), load_data(DataConfig())
    assert first.corpus_hash == second.corpus_hash
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert len(first.train) > 300 * 8  # the default run sees no sample twice
    assert 0.01 < len(first.validation.tokens) / len(first.train.tokens) < 0.1
