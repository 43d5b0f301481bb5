"""Pairs against sets written by hand: splits, padding, direction, files and their errors."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from normstream.data import parallel_texts
from normstream.data.batches import AnyBatch, Samples
from normstream.data.translation import (
    DecodingConfig,
    Pair,
    PairedTokens,
    TranslationConfig,
    TranslationData,
    load_translation,
)

PAIRS = [
    (f"the {word}", f"das {word.upper()}")
    for word in ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx"]
]
EOT = 256


@pytest.fixture
def tsv(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS), encoding="utf-8")
    return path


@pytest.fixture
def load(tsv: Path) -> Callable[..., TranslationData]:
    def make(**options: Any) -> TranslationData:
        defaults = {"source": str(tsv), "tokenizer": "bytes", "validation_fraction": 0.3}
        return load_translation(TranslationConfig(**(defaults | options)))

    return make


def texts(data: TranslationData) -> set[tuple[str, str]]:
    return {(pair.source, pair.target) for split in (data.train, data.validation) for pair in split.pairs}


def test_a_batch_by_hand() -> None:
    """Lengths 1 and 3 in the source, 2 and 0 in the target; 9 ends, begins and fills."""
    pairs = [Pair("", "", np.array([1]), np.array([2, 3])), Pair("", "", np.array([4, 5, 6]), np.array([], np.uint16))]
    data = PairedTokens(pairs, eot=9)
    batch = data.batch([1, 0])
    assert batch.source_BS.tolist() == [[4, 5, 6, 9], [1, 9, 9, 9]]
    assert batch.padding_BS.tolist() == [[False] * 4, [False, False, True, True]]
    assert batch.inputs_BT.tolist() == [[9, 9, 9], [9, 2, 3]]
    assert batch.targets_BT.tolist() == [[9, -100, -100], [2, 3, 9]]
    assert batch.n_targets == 4
    assert data.tokens_per_sample == (2 + 3 + 4 + 1) / 2
    assert data.target_tokens().tolist() == [2, 3, 9, 9]
    assert isinstance(data, Samples)
    assert isinstance(batch, AnyBatch)
    parts = list(batch.split(2))
    assert [part.source_BS.tolist() for part in parts] == [[[4, 5, 6, 9]], [[1, 9, 9, 9]]]
    assert [part.padding_BS.dtype for part in parts] == [torch.bool] * 2
    with pytest.raises(IndexError, match="got -1 to -1"):
        data.batch([-1])


def test_tokens_are_the_bytes_of_the_texts(load: Callable[..., TranslationData]) -> None:
    data = load()
    assert texts(data) == set(PAIRS)
    for split in (data.train, data.validation):
        assert split.size == len(split) == len(split.pairs) > 0
        for number, pair in enumerate(split.pairs):
            batch = split.batch([number])
            assert batch.source_BS.tolist() == [[*pair.source.encode(), EOT]]
            assert batch.targets_BT.tolist() == [[*pair.target.encode(), EOT]]


def test_no_source_is_on_both_sides(tsv: Path, load: Callable[..., TranslationData]) -> None:
    again = "".join(f"{source}\t{target}?\n" for source, target in PAIRS)
    tsv.write_text(tsv.read_text(encoding="utf-8") + again, encoding="utf-8")
    data = load()
    assert data.train.size + data.validation.size == 2 * len(PAIRS)
    assert not {pair.source for pair in data.train.pairs} & {pair.source for pair in data.validation.pairs}


def test_three_forms_of_files_give_the_same(tsv: Path, tmp_path: Path, load: Callable[..., TranslationData]) -> None:
    rows = [json.dumps({"de": target, "en": source, "id": 3}) for source, target in PAIRS]
    nested = [json.dumps({"translation": {"de": target, "en": source}}) for source, target in PAIRS]
    (tmp_path / "flat.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "nested.jsonl").write_text("\n\n".join(nested) + "\n", encoding="utf-8")
    (tmp_path / "lines.en").write_text("\r\n".join(source for source, _ in PAIRS) + "\r\n", encoding="utf-8")
    (tmp_path / "lines.de").write_text("\n".join(target for _, target in PAIRS), encoding="utf-8")
    hashes = {load(source=str(tmp_path / name)).corpus_hash for name in ("flat.jsonl", "nested.jsonl", "lines")}
    assert hashes == {load().corpus_hash}


def test_the_other_direction_swaps_named_columns(tmp_path: Path, load: Callable[..., TranslationData]) -> None:
    for code, side in (("en", 0), ("de", 1)):
        (tmp_path / f"lines.{code}").write_text("\n".join(pair[side] for pair in PAIRS), encoding="utf-8")
    data = load(source=str(tmp_path / "lines"), direction="de-en")
    assert texts(data) == {(target, source) for source, target in PAIRS}


def test_a_first_line_names_the_columns_of_a_tsv(tsv: Path, load: Callable[..., TranslationData]) -> None:
    plain = tsv.read_text(encoding="utf-8")
    tsv.write_text("en\tde\n" + plain, encoding="utf-8")
    assert texts(load()) == set(PAIRS)
    assert texts(load(direction="de-en")) == {(target, source) for source, target in PAIRS}
    tsv.write_text("en\tfr\n" + plain, encoding="utf-8")
    assert texts(load()) == {("en", "fr"), *PAIRS}  # not the languages of this direction: a pair like any other


def test_hugging_face_rows(monkeypatch: pytest.MonkeyPatch, load: Callable[..., TranslationData]) -> None:
    calls = []

    def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> list[dict[str, Any]]:
        calls.append((name, subset, split, streaming))
        return [{"translation": {"de": target, "en": source}} for source, target in PAIRS]

    monkeypatch.setattr(parallel_texts, "import_extra", lambda *names: SimpleNamespace(load_dataset=load_dataset))
    data = load(source="hf:wmt14:de-en", n_pairs=10)
    assert calls == [("wmt14", "de-en", "train", True)]
    assert texts(data) == set(PAIRS[:10])
    with pytest.raises(ValueError, match=r"row 1: no text in column 'fr'; columns: de, en"):
        load(source="hf:wmt14:de-en", direction="fr-en")
    with pytest.raises(ValueError, match="names no data set"):
        load(source="hf:")


def test_white_space_is_collapsed_and_empty_texts_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("  a   b\t c\u00a0 d\n\t x\nu\tv\n", encoding="utf-8")
    data = load_translation(TranslationConfig(source=str(path), tokenizer="bytes"))
    assert texts(data) == {("a b", "c d"), ("u", "v")}


def test_one_bpe_of_both_languages_from_training_pairs(load: Callable[..., TranslationData]) -> None:
    data = load(tokenizer="bpe:270")
    assert data.vocab_size == 270
    assert len(data.tokenizer.encode("the")) < 3
    assert len(data.tokenizer.encode("das")) < 3
    pair = data.validation.pairs[0]
    assert data.tokenizer.decode(pair.target_tokens.tolist()) == pair.target
    assert data.corpus_hash == load().corpus_hash


def test_long_pairs_are_left_out_with_a_warning(tsv: Path, load: Callable[..., TranslationData]) -> None:
    assert load(max_len=7).n_too_long == 0  # 6 bytes and end-of-text
    tsv.write_text(tsv.read_text(encoding="utf-8") + "source\tseventh\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="1 of 13 pairs are left out: a text has more than 7 tokens"):
        data = load(max_len=7)
    assert data.n_too_long == 1
    assert texts(data) == set(PAIRS)
    with pytest.raises(ValueError, match=r"13, of which 13 are longer than max_len 6, .* 0 .* training and 0"):
        load(max_len=6)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "one\n", "a.tsv, line 1: expected 2 columns with a tab between them, got 1"),
        ("a.tsv", b"\xff\tx\n", "a.tsv is not UTF-8"),
        ("a.jsonl", "{", "a.jsonl, line 1: not valid JSON"),
        ("a.jsonl", "[]", "a.jsonl, line 1: expected an object, got a list"),
        ("a.jsonl", '{"en": "x", "text": "y"}', "no text in column 'de'; columns: en, text"),
        ("a.jsonl", '{"en": "x", "de": 3}', "no text in column 'de'"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        load_translation(TranslationConfig(source=str(path), tokenizer="bytes"))


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "x.en").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"no pairs of texts in .*x.en and x.de"):
        load_translation(TranslationConfig(source=str(tmp_path / "x"), tokenizer="bytes"))
    (tmp_path / "x.de").write_text("a\n")
    with pytest.raises(ValueError, match=r"x.en has 2 lines and .*x.de 1"):
        load_translation(TranslationConfig(source=str(tmp_path / "x"), tokenizer="bytes"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "en"}, "two codes of languages such as en-de, got 'en'"),
        ({"direction": "en-en"}, "two codes"),
        ({"direction": "en-fr"}, "source numbers has direction en-de or de-en, got 'en-fr'"),
        ({"max_len": 1}, "max_len must be at least 2"),
        ({"n_pairs": 1}, "n_pairs must be at least 2"),
        ({"validation_fraction": 1.0}, "between 0 and 1"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TranslationConfig(**options)


@pytest.mark.parametrize("options", [{"beam_size": 0}, {"n_pairs": 0}, {"length_penalty": -0.1}])
def test_decoding_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DecodingConfig(**options)
