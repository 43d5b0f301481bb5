"""Labelled texts and pairs of texts: files as they are found in the wild, sequences counted by hand, clear errors."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from normstream.data import labelled_files
from normstream.data.labelled_files import Columns, Example, read_examples
from normstream.data.paraphrases import SLOTS, paraphrases
from normstream.data.text_pairs import PairSamples, TextPairConfig, join_texts, load_pairs

MRPC = (
    "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    '1\t7\t8\tHe said "yes.\tHe agreed, he "said.\n'
    "0\t9\t10\tIt rains.\tIt's dry \u00e9.\n"
)
MRPC_COLUMNS = Columns(text="#1 String", pair="#2 String", label="Quality")


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "mark", "newline"), [("train.tsv", "", "\n"), ("train.txt", "\ufeff", "\n"), ("train.tsv", "", "\r\n")]
)
def test_mrpc_as_microsoft_and_glue_give_it(name: str, mark: str, newline: str, tmp_path: Path):
    """Quotes without a partner, a byte order mark, Windows line ends."""
    path = write(tmp_path, name, (mark + MRPC).replace("\n", newline))
    assert read_examples(path, MRPC_COLUMNS) == [
        Example("1", 'He said "yes.', 'He agreed, he "said.'),
        Example("0", "It rains.", "It's dry \u00e9."),
    ]


def test_rte_has_named_classes(tmp_path: Path):
    text = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n1\tc\td\tentailment\n"
    examples = read_examples(write(tmp_path, "train.tsv", text), Columns("sentence1", "sentence2"))
    assert [example.label for example in examples] == ["not_entailment", "entailment"]


def test_csv_with_quotes_and_line_ends_inside(tmp_path: Path):
    path = write(tmp_path, "a.csv", 'label,text\nspam,"a ""b"", c\nd"\nham,e\n')
    assert read_examples(path, Columns()) == [Example("spam", 'a "b", c\nd'), Example("ham", "e")]


def test_jsonl(tmp_path: Path):
    rows = [{"label": 1, "text": "a", "text_pair": "b"}, {"label": "x", "text": "a\u2028b", "text_pair": ""}]
    path = write(tmp_path, "a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert read_examples(path, Columns()) == [Example("1", "a", "b"), Example("x", "a\u2028b", "")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "", "a.tsv is empty"),
        ("a.tsv", "label\ttext\n", "a.tsv has no examples"),
        ("a.csv", b"label,text\n1,\xff\n", r"a.csv is not UTF-8 \(byte 13\)"),
        ("a.tsv", "labl\ttext\n1\ta\n", "line 2 has no column 'label'; did you mean 'labl'.*label_column"),
        ("a.tsv", "label\tsentence\n1\ta\n", "no column 'text'; .*Known: label, sentence; .*text_column"),
        ("a.tsv", "label\ttext\n\ta\n", "line 2: the label is missing"),
        ("a.tsv", "label\ttext\n1\ta\n0\n", "line 3: 1 fields, expected 2"),
        ("a.csv", 'label,text\n1,"a\n', "line 2: unexpected end of data"),
        ("a.jsonl", '{"label": 1, "text": "a"}\n{"label"', "line 2: not valid JSON"),
        ("a.jsonl", "[1]", "line 1: expected an object"),
        ("a.jsonl", '{"label": 0.5, "text": "a"}', "expected a class as text or whole number, got 0.5"),
        ("a.jsonl", '{"label": null, "text": "a"}', "the label is missing"),
        ("a.jsonl", '{"label": 1, "text": null}', "expected text in column 'text', got NoneType"),
        ("a.parquet", "x", "expected a file of one of the kinds .tsv, .txt, .csv, .jsonl, got .parquet"),
    ],
)
def test_files_that_cannot_be_read(name: str, text: str | bytes, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        read_examples(write(tmp_path, name, text), Columns())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "paraphrase"}, "unknown source 'paraphrase'; did you mean 'paraphrases'"),
        ({"source": "no/such.tsv"}, "no file no/such.tsv"),
        ({"tokenizer": "byte"}, "unknown tokenizer 'byte'; did you mean 'bytes'"),
        ({"seq_len": 4}, "seq_len must be at least 5, got 4"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie between 0 and 1"),
        ({"validation": "no/such.tsv"}, "no file no/such.tsv"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load_pairs(TextPairConfig(**options))


def test_a_single_class_and_an_unseen_one(tmp_path: Path):
    one = write(tmp_path, "one.tsv", "label\ttext\n" + "".join(f"a\t{i}\n" for i in range(40)))
    with pytest.raises(ValueError, match="training examples have label a; expected two classes or more"):
        load_pairs(TextPairConfig(source=one))
    two = write(tmp_path, "two.tsv", "label\ttext\nyes\ta\nno\tb\n")
    held = write(tmp_path, "held.tsv", "label\ttext\nyess\ta\n")
    with pytest.raises(ValueError, match="label 'yess', which no training example has; did you mean 'yes'"):
        load_pairs(TextPairConfig(source=two, validation=held))


def test_numbers_are_ordered_as_numbers_and_a_file_is_held_out(tmp_path: Path):
    train = write(tmp_path, "train.tsv", "label\ttext\n10\ta\n9\tb\n0\tc\n")
    held = write(tmp_path, "held.csv", "label,text\n9,x\n")
    data = load_pairs(TextPairConfig(source=train, validation=held))
    assert data.classes == ("0", "9", "10")
    assert data.train.labels == [2, 1, 0]
    assert data.validation.labels == [1]


def test_equal_rows_are_on_one_side(tmp_path: Path):
    rows = [f"{i % 2}\ttext {i % 50}\n" for i in range(500)]
    data = load_pairs(TextPairConfig(source=write(tmp_path, "a.tsv", "label\ttext\n" + "".join(rows))))
    splits = data.train, data.validation
    sides = [{bytes(sequence[1:-1].tolist()) for sequence in split.sequences} for split in splits]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 50


def test_a_batch_by_hand():
    samples = PairSamples([np.array([9, 1, 9, 2, 3, 9]), np.array([9, 4, 9])], [3, 3], [1, 0], eot=9)
    batch = samples.batch([1, 0])
    assert batch.tokens_BT.tolist() == [[9, 4, 9, 9, 9, 9], [9, 1, 9, 2, 3, 9]]
    assert batch.padding_BT.tolist() == [[False] * 3 + [True] * 3, [False] * 6]
    assert batch.types_BT.tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1]]
    assert batch.labels_B.tolist() == [0, 1]
    assert batch.n_targets == 2
    assert [part.labels_B.tolist() for part in batch.split(2)] == [[0], [1]]
    assert samples.tokens_per_sample == 4.5
    with pytest.raises(IndexError, match=r"\[0, 2\), got 0 to 2"):
        samples.batch([0, 2])


@pytest.mark.parametrize(
    ("n_first", "n_second", "room", "kept"),
    [
        (3, 3, 10, (3, 3)),
        (20, 3, 10, (7, 3)),
        (3, 20, 10, (3, 7)),
        (20, 20, 10, (5, 5)),
        (5, 20, 10, (5, 5)),
        (20, 20, 11, (6, 5)),
    ],
)
def test_the_longer_text_loses_its_end(n_first: int, n_second: int, room: int, kept: tuple[int, int]):
    sequence, n_type_0 = join_texts(np.full(n_first, 1), np.full(n_second, 2), eot=9, seq_len=room + 3)
    counts = Counter(sequence.tolist())
    assert (counts[1], counts[2], counts[9]) == (*kept, 3)
    assert n_type_0 == kept[0] + 2


def test_texts_without_a_pair_and_the_tokens_of_one(tmp_path: Path):
    path = write(tmp_path, "a.tsv", "label\ttext\tother\n1\tabcdefgh\tx\n0\tab\ty\n")
    held = write(tmp_path, "b.tsv", "label\ttext\n1\tab\n")
    data = load_pairs(TextPairConfig(source=path, validation=held, seq_len=6))
    assert [sequence.tolist() for sequence in data.train.sequences] == [[256, 97, 98, 99, 100, 256], [256, 97, 98, 256]]
    pairs = load_pairs(TextPairConfig(source=path, pair_column="other", validation=path))
    assert all((sequence == 256).sum() == 3 for sequence in pairs.train.sequences)


def test_hugging_face_rows_with_a_validation_split(monkeypatch: pytest.MonkeyPatch):
    """GLUE's MRPC as the library gives it: rows of columns, classes as numbers."""
    rows = [{"sentence1": "a", "sentence2": "b", "label": i % 2, "idx": i} for i in range(4)]
    asked: list[tuple[str, str | None]] = []

    def load_dataset(name: str, subset: str | None) -> dict[str, Any]:
        asked.append((name, subset))
        return {"train": rows, "validation": rows[:1], "test": [rows[0] | {"label": -1}]}

    monkeypatch.setattr(labelled_files, "import_extra", lambda *names: SimpleNamespace(load_dataset=load_dataset))
    config = TextPairConfig(source="hf:nyu-mll/glue:mrpc", text_column="sentence1", pair_column="sentence2")
    data = load_pairs(config)
    assert asked[0] == ("nyu-mll/glue", "mrpc")
    assert (len(data.train), len(data.validation), data.classes) == (4, 1, ("0", "1"))
    with pytest.raises(ValueError, match="no column 'sentense1'; did you mean 'sentence1'"):
        load_pairs(replace(config, text_column="sentense1"))


def test_the_generated_pairs_say_what_their_labels_say():
    """Read back by a dictionary of the words: equal meanings in a pair with label 1, three others in one with 0."""
    meaning = {word: (kind, n) for kind, slot in enumerate(SLOTS) for n, words in enumerate(slot) for word in words}
    assert len(meaning) == 36  # no word has two meanings
    examples = paraphrases(2000)
    assert examples == paraphrases(2000)
    assert examples != paraphrases(2000, seed=1)
    for example in examples:
        assert example.pair is not None
        first, second = ({meaning[w] for w in text.split()} for text in (example.text, example.pair))
        assert len(first) == len(second) == 3
        assert len(first & second) == (3 if example.label == "1" else 0)
    assert 900 < sum(example.label == "1" for example in examples) < 1100


def test_the_default_has_no_pair_on_both_sides():
    data = load_pairs(TextPairConfig())
    texts = [{tuple(sequence.tolist()) for sequence in split.sequences} for split in (data.train, data.validation)]
    assert not texts[0] & texts[1]
    assert len(data.validation) > 500
    assert data.vocab_size == 258
    assert data.train.batch(range(4)).tokens_BT.dtype == torch.int64
