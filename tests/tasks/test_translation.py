"""The translation task: its loss, its metrics, a run on a small file, and the command."""

import io
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import normstream
from normstream.cli import main
from normstream.data import DataConfig, load_tokenizer
from normstream.data.translation import DecodingConfig, TranslationConfig
from normstream.lab.artifacts import read
from normstream.models import DecoderConfig, EncoderDecoder, EncoderDecoderConfig
from normstream.optim import OptimizerConfig
from normstream.tasks import get_task
from normstream.tasks import translation as translation_task
from normstream.tasks.translation import translate
from normstream.training import RunResult, TrainConfig, load_model, read_metrics, train
from normstream.training.checkpoint import find_checkpoint, read_checkpoint_config

sacrebleu = pytest.importorskip("sacrebleu")
WORDS = {"red": "rot", "blue": "blau", "green": "grün", "grey": "grau"}
TEXTS = [(a, b, c, d) for a in WORDS for b in WORDS for c in WORDS for d in WORDS]


def german(words: Sequence[str]) -> str:
    return " ".join(WORDS[word] for word in words)


def make_config(folder: Path, **options: Any) -> TrainConfig:
    """Four words a pair, translated one by one."""
    path = folder / "pairs.tsv"
    path.write_text("".join(f"{' '.join(words)}\t{german(words)}\n" for words in TEXTS), encoding="utf-8")
    defaults: dict[str, Any] = {
        "model": EncoderDecoderConfig(placement="siamese", dim=32, n_layers=1, n_heads=2, max_seq_len=32),
        "data": TranslationConfig(
            source=str(path),
            tokenizer="bpe:280",
            max_len=24,
            validation_fraction=0.2,
            decoding=DecodingConfig(beam_size=2, n_pairs=20),
        ),
        "optimizer": OptimizerConfig(lr=1e-2),
        "batch_size": 16,
        "eval_batches": 2,
        "device": "cpu",
    }
    return TrainConfig(task="translation", **(defaults | options))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return make_config(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """The folder and the result of a short training."""
    folder = tmp_path_factory.mktemp("translation")
    return folder / "run", train(make_config(folder, steps=80, eval_every=40), folder / "run")


def parts(config: TrainConfig) -> tuple[Any, Any, EncoderDecoder]:
    """The task, its data and an initialized model."""
    kind = get_task("translation")
    data = kind.load(config.data)
    config = replace(config, model=kind.resolve(config.model, data))
    model = EncoderDecoder(config.model)  # pyright: ignore[reportArgumentType]
    normstream.initialize(model, seed=0)
    return kind(config, data), data, model


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_cross_entropy_of_the_target_tokens(smoothing: float, config: TrainConfig) -> None:
    task, data, model = parts(replace(config, label_smoothing=smoothing))
    batch = data.train.batch([0, 5, 9])
    losses = task.losses(model, batch, batch.n_targets, 1.0)
    log_p = model(batch.source_BS, batch.inputs_BT, batch.padding_BS).log_softmax(-1)
    counted = batch.targets_BT >= 0
    nll = -log_p[counted].gather(-1, batch.targets_BT[counted][:, None]).mean()
    even = -log_p[counted].mean()  # over tokens of the vocabulary and positions
    assert losses.main.item() == pytest.approx(nll.item(), rel=1e-5)
    assert losses.loss.item() == pytest.approx(((1 - smoothing) * nll + smoothing * even).item(), rel=1e-5)
    assert set(losses.parts) == ({"label_smoothing"} if smoothing else set())


def test_micro_batches_add_up(config: TrainConfig) -> None:
    task, data, model = parts(config)
    batch = data.train.batch([0, 5, 9, 11])
    whole = task.losses(model, batch, batch.n_targets, 1.0).main.item()
    halves = [task.losses(model, micro, batch.n_targets, 0.5).main.item() for micro in batch.split(2)]
    assert sum(halves) == pytest.approx(whole, rel=1e-5)


def test_evaluation_is_a_mean_over_tokens(config: TrainConfig) -> None:
    task, _, model = parts(config)
    found = task.evaluate(model)
    total, right, count = 0.0, 0, 0
    for batch in task.eval_batches:
        for row in range(len(batch.source_BS)):
            n_source = int((~batch.padding_BS[row]).sum())
            n_target = int((batch.targets_BT[row] >= 0).sum())
            logits = model(batch.source_BS[row : row + 1, :n_source], batch.inputs_BT[row : row + 1, :n_target])[0]
            targets = batch.targets_BT[row, :n_target]
            total += F.cross_entropy(logits, targets, reduction="sum").item()
            right += int((logits.argmax(-1) == targets).sum())
            count += n_target
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * right / count)
    assert task.uniform_loss() == pytest.approx(math.log(task.data.vocab_size))


def test_exact_match_and_bleu_by_hand(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two translations one has its last word wrong: n-grams match in 7 of 8, 5 of 6, 3 of 4 and 1 of 2 cases."""
    config = replace(config, data=replace(config.data, decoding=DecodingConfig(n_pairs=2)))
    task, _, model = parts(config)

    def nearly(model: Any, sources: Sequence[str], *others: Any) -> list[str]:
        first, second = (german(source.split()) for source in sources)
        return [first, " ".join([*second.split()[:3], "falsch"])]

    monkeypatch.setattr(translation_task, "translate", nearly)
    scores = task.judge(model, tmp_path)
    assert scores["exact_match"] == 50
    assert scores["bleu"] == pytest.approx(100 * (7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** (1 / 4))


def test_a_run_learns(run: tuple[Path, RunResult]) -> None:
    """Whoever does not read the source is left with one of four words, four times: 4 ln 4 a target. Half is beaten."""
    folder, result = run
    assert result.val_loss is not None
    evaluations = read_metrics(folder / "metrics.jsonl", "eval")
    assert result.val_loss == evaluations[-1]["loss"] < 0.5 * 4 * math.log(4) / longest_target(folder)
    assert result.metrics["accuracy"] == evaluations[-1]["accuracy"] > 80
    assert set(result.metrics) == {"exact_match", "bleu", "accuracy"}
    assert not result.collapsed


def longest_target(run: Path) -> int:
    """Tokens of the longest target of a run, end-of-text included."""
    tokenizer = load_tokenizer(read_checkpoint_config(find_checkpoint(run)).data.tokenizer)
    return max(len(tokenizer.encode(german(words))) + 1 for words in TEXTS)


def test_what_is_judged_is_what_the_file_says(run: tuple[Path, RunResult]) -> None:
    folder, result = run
    header, *lines = (folder / "translations.tsv").read_text(encoding="utf-8").splitlines()
    assert header == "source\treference\thypothesis"
    rows = [line.split("\t") for line in lines]
    assert len({source for source, _, _ in rows}) == len(rows) == 20
    assert all(german(source.split()) == reference for source, reference, _ in rows)
    references, hypotheses = [row[1] for row in rows], [row[2] for row in rows]
    matches = sum(a == b for a, b in zip(references, hypotheses, strict=True))
    assert matches > 0
    assert result.metrics["bleu"] > 0
    assert result.metrics["exact_match"] == 100 * matches / 20
    assert result.metrics["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score)


def test_the_report_shows_the_first_translations(run: tuple[Path, RunResult]) -> None:
    artifact, *others = get_task("translation").artifacts
    assert not others
    head, *rows = read(run[0] / artifact.file)["rows"]
    assert head == ("source", "reference", "hypothesis")
    assert len(rows) == 8
    assert all(reference == german(source.split()) for source, reference, _ in rows)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines that the command prints."""
    capsys.readouterr()
    main(["translate", *words, "--device", "cpu"])
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Why the command is refused."""
    with pytest.raises(SystemExit) as stopped:
        main(["translate", *words, "--device", "cpu"])
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_command_is_the_library_call(
    run: tuple[Path, RunResult], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, texts = str(run[0]), ["red blue red grey", "grey grey blue green"]
    data = read_checkpoint_config(find_checkpoint(run[0])).data
    data = replace(data, decoding=replace(data.decoding, beam_size=3, length_penalty=1.0))
    expected = translate(load_model(run[0]), texts, data, load_tokenizer(data.tokenizer))
    options = [word for text in texts for word in ("--text", text)]
    assert said(capsys, folder, *options, "--beam-size", "3", "--length-penalty", "1") == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{texts[0]}\n\n  {texts[1]}\n"))
    assert said(capsys, folder, "--beam-size", "3", "--length-penalty", "1.0") == [expected[0], "", expected[1]]


def test_what_cannot_be_translated(
    run: tuple[Path, RunResult], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = str(run[0])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n \n"))
    assert "nothing to translate; give --text" in refused(capsys, folder)
    assert "beam_size must be at least 1, got 0" in refused(capsys, folder, "--text", "red", "--beam-size", "0")
    assert "source of 41 tokens, but max_seq_len is 32" in refused(capsys, folder, "--text", "red " * 40)
    assert "no checkpoint in" in refused(capsys, str(tmp_path), "--text", "one")


def test_a_run_of_another_task_is_not_translated_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 60)
    model = DecoderConfig(dim=8, n_layers=1, n_heads=2, max_seq_len=16)
    data = DataConfig(source=str(tmp_path / "text.txt"), seq_len=16)
    train(TrainConfig(model=model, data=data, steps=1, batch_size=2, eval_batches=1, device="cpu"), tmp_path / "lm")
    message = refused(capsys, str(tmp_path / "lm"), "--text", "one")
    assert "a model of the task lm, which normstream translate is not for; take normstream generate" in message


def test_missing_sacrebleu_is_missed_before_the_training(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ImportError, match=r"needs sacrebleu: pip install 'normstream\[translation\]'"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_texts_longer_than_the_model(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match=r"data\.max_len 24 is above model\.max_seq_len 16"):
        replace(config, model=replace(config.model, max_seq_len=16))


def test_gradients_reach_every_parameter(config: TrainConfig) -> None:
    task, data, model = parts(config)
    batch = data.train.batch(range(4))
    task.losses(model, batch, batch.n_targets, 1.0).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
