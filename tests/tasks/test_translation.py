"""The translation task: its loss, its metrics, a run on a small file, and the command."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import normstream
from normstream.cli import main
from normstream.data.translation import DecodingConfig, TranslationConfig
from normstream.models import EncoderDecoder, EncoderDecoderConfig
from normstream.optim import OptimizerConfig
from normstream.tasks import get_task
from normstream.training import RunResult, TrainConfig, train

sacrebleu = pytest.importorskip("sacrebleu")
WORDS = ("red", "blue", "green", "grey")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Pairs of words, each word its own translation written backwards."""
    texts = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS]
    lines = ["en\tde", *(f"{text}\t{text[::-1]}" for text in texts)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return TrainConfig(
        task="translation",
        model=EncoderDecoderConfig(placement="pre", dim=32, n_layers=1, n_heads=2, max_seq_len=32),
        data=TranslationConfig(
            source=str(tmp_path / "pairs.tsv"),
            tokenizer="bytes",
            max_len=24,
            validation_fraction=0.2,
            decoding=DecodingConfig(beam_size=2, n_pairs=4),
        ),
        optimizer=OptimizerConfig(lr=3e-3),
        steps=4,
        batch_size=8,
        eval_every=2,
        eval_batches=2,
        device="cpu",
    )


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
    assert task.uniform_loss() == pytest.approx(math.log(257))


def test_what_is_judged_is_what_the_file_says(config: TrainConfig, tmp_path: Path) -> None:
    task, _, model = parts(config)
    scores = task.judge(model, tmp_path)
    header, *lines = (tmp_path / "translations.tsv").read_text(encoding="utf-8").splitlines()
    assert header == "source\treference\thypothesis"
    rows = [line.split("\t") for line in lines]
    assert len(rows) == 4
    assert all(source[::-1] == reference for source, reference, _ in rows)
    references, hypotheses = [row[1] for row in rows], [row[2] for row in rows]
    assert scores["exact_match"] == 100 * sum(a == b for a, b in zip(references, hypotheses, strict=True)) / 4
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references], force=True).score)


@pytest.mark.filterwarnings("ignore")
def test_a_run_learns_and_its_checkpoint_translates(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result: RunResult = train(replace(config, steps=120, eval_every=60), tmp_path / "run")
    assert result.val_loss is not None
    assert result.val_loss < result.baseline_loss - 0.5  # three words of four, so far from guessing letters
    assert set(result.metrics) == {"exact_match", "bleu", "accuracy"}
    capsys.readouterr()
    main(["translate", str(tmp_path / "run"), "--text", "red blue", "--beam-size", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_texts_longer_than_the_model(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match=r"data\.max_len 24 is above model\.max_seq_len 16"):
        replace(config, model=replace(config.model, max_seq_len=16))


def test_a_run_of_another_task_is_not_translated_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["translate", str(tmp_path), "--text", "one"])
    assert stopped.value.code == 2
    assert "no checkpoint in" in capsys.readouterr().err


def test_gradients_reach_every_parameter(config: TrainConfig) -> None:
    task, data, model = parts(config)
    batch = data.train.batch(range(4))
    task.losses(model, batch, batch.n_targets, 1.0).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
