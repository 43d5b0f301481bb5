"""Classification of texts as a task: scores by hand, a run that learns, and heads that start anew from an encoder."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score

from normstream.data.masking import MaskedDataConfig
from normstream.data.text_pairs import PairData, TextPairConfig, load_pairs
from normstream.init import initialize
from normstream.models import Classifier, ClassifierConfig, EncoderConfig
from normstream.optim import OptimizerConfig
from normstream.tasks.classification import TextClassification
from normstream.training import TrainConfig, init_from, load_model, resolve, train

SIZES: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 64}


def write(folder: Path, n_classes: int) -> str:
    """Texts whose class is the number of their letters b, modulo the number of classes."""
    rows = [f"{i % n_classes}\t{'ab' * (i % n_classes)}a{i}\tx\n" for i in range(300)]
    path = folder / f"{n_classes}.tsv"
    path.write_text("label\ttext\ttext_pair\n" + "".join(rows))
    return str(path)


@pytest.fixture(scope="module", params=[2, 3])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairData:
    source = write(tmp_path_factory.mktemp("pairs"), request.param)
    return load_pairs(TextPairConfig(source=source, seq_len=64, validation_fraction=0.2))


def config_of(data: PairData, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {"model": ClassifierConfig(**SIZES), "batch_size": 8, "eval_batches": 20, "device": "cpu"}
    return resolve(TrainConfig(task="classification", data=data.config, **(options | changes)), data)


def classifier(config: TrainConfig) -> Classifier:
    assert isinstance(config.model, ClassifierConfig)
    model = Classifier(config.model)
    initialize(model, 0)
    return model


def test_scores_are_those_of_scikit_learn(data: PairData):
    config = config_of(data)
    task, model = TextClassification(config, data), classifier(config).eval()
    with torch.no_grad():
        model.class_head.weight.mul_(30)  # guesses that differ
        logits = torch.cat([model(batch.tokens_BT, batch.padding_BT) for batch in task.eval_batches])
    labels = torch.cat([batch.labels_B for batch in task.eval_batches])
    scores = task.evaluate(model.train())
    assert model.training
    assert len(labels) == len(data.validation)
    assert len(set(logits.argmax(-1).tolist())) > 1
    assert scores["accuracy"] == pytest.approx(100 * accuracy_score(labels, logits.argmax(-1)))
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    if len(data.classes) == 2:
        assert scores["f1"] == pytest.approx(100 * f1_score(labels, logits.argmax(-1)))
    else:
        assert "f1" not in scores


def test_losses_of_micro_batches_add_up_to_the_mean(data: PairData):
    config = config_of(data)
    task, model = TextClassification(config, data), classifier(config)
    batch = data.train.batch(range(8))
    total = sum(task.losses(model, part, batch.n_targets, 0.25).loss for part in batch.split(4))
    torch.testing.assert_close(total, F.cross_entropy(model(batch.tokens_BT, batch.padding_BT), batch.labels_B))


def test_token_types_say_which_text_where_the_model_has_them(data: PairData):
    config = config_of(data, model=ClassifierConfig(**SIZES, n_types=2))
    task, model = TextClassification(config, data), classifier(config)
    batch = data.train.batch(range(8))
    logits = model(batch.tokens_BT, batch.padding_BT, batch.types_BT)
    torch.testing.assert_close(task.losses(model, batch, 8, 1.0).loss, F.cross_entropy(logits, batch.labels_B))
    assert not torch.allclose(logits, model(batch.tokens_BT, batch.padding_BT))


def test_baselines(data: PairData):
    """Classes are about equally frequent: a guess of their frequencies is near the uniform one, by one count each."""
    task = TextClassification(config_of(data), data)
    n, labels = len(data.classes), torch.cat([batch.labels_B for batch in data_batches(data)]).tolist()
    counts = [data.train.labels.count(label) + 1 for label in range(n)]
    wanted = sum(-math.log(counts[label] / sum(counts)) for label in labels) / len(labels)
    assert task.baseline_loss() == pytest.approx(wanted)
    assert task.uniform_loss() == pytest.approx(math.log(n) + 0.1)


def data_batches(data: PairData) -> list[Any]:
    return [data.validation.batch(range(len(data.validation)))]


def test_a_run_learns_and_its_checkpoint_loads(data: PairData, tmp_path: Path):
    config = config_of(data, steps=150, batch_size=16, optimizer=OptimizerConfig(lr=5e-3), eval_every=150)
    result = train(config, tmp_path / "run", data=data)
    assert not result.collapsed
    assert result.metrics["accuracy"] > 90
    model = load_model(tmp_path / "run")
    assert isinstance(model, Classifier)
    assert TextClassification(config, data).evaluate(model)["loss"] == pytest.approx(result.val_loss, abs=1e-6)


def test_fine_tuning_from_a_masked_language_model_and_from_another_classifier(tmp_path: Path):
    """The trunk is copied, the head is new; the next classifier takes the pooler along if the classes are as many."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    sizes: dict[str, Any] = SIZES | {"placement": "post"}
    masked = TrainConfig(
        task="mlm",
        model=EncoderConfig(**sizes, head="bert"),
        data=MaskedDataConfig(source=str(tmp_path / "text.txt"), seq_len=16),
        steps=2,
        device="cpu",
    )
    train(masked, tmp_path / "mlm")
    model = ClassifierConfig(**sizes, pooler=True)
    last = tmp_path / "mlm"
    for n_classes in (2, 3):
        data = load_pairs(TextPairConfig(source=write(tmp_path, n_classes), seq_len=64))
        train(config_of(data, model=model, steps=2, init_from=last), tmp_path / str(n_classes), data=data)
        report = json.loads((tmp_path / str(n_classes) / "run.json").read_text())["init_from"]
        new = ["class_head.weight"] if n_classes == 3 else ["pooler.weight", "pooler.bias", "class_head.weight"]
        assert sorted(report["new"]) == sorted(new)
        assert all(name == old for name, old in report["copied"].items())
        assert "tok_embeddings.weight" in report["copied"]
        last = tmp_path / str(n_classes)
        if n_classes == 2:
            dropped = {name.partition(".")[0] for name in report["dropped"]}
            assert dropped == {"head_transform", "lm_head"}


def test_what_was_copied_is_the_same_function(tmp_path: Path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    masked = TrainConfig(
        task="mlm",
        model=EncoderConfig(**SIZES),
        data=MaskedDataConfig(source=str(tmp_path / "text.txt"), seq_len=16),
        steps=2,
        device="cpu",
    )
    train(masked, tmp_path / "mlm")
    source = load_model(tmp_path / "mlm")
    target = Classifier(ClassifierConfig(**SIZES, vocab_size=258)).eval()
    initialize(target, 1)
    head = target.class_head.weight.detach().clone()
    init_from(target, tmp_path / "mlm")
    tokens = torch.arange(10)[None]
    torch.testing.assert_close(target.hidden(tokens), source.hidden(tokens), rtol=0, atol=0)
    assert torch.equal(target.class_head.weight, head)


def test_trunks_of_other_sizes_are_refused(tmp_path: Path):
    """Heads may differ, nothing else may."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    data = MaskedDataConfig(source=str(tmp_path / "text.txt"), seq_len=16)
    train(TrainConfig(task="mlm", model=EncoderConfig(**SIZES), data=data, steps=1, device="cpu"), tmp_path / "mlm")
    for changes, message in (
        ({"n_layers": 3}, "layers.2.attention.wq.weight is only here"),
        ({"n_types": 2}, "type_embeddings.weight is only here"),
        ({"vocab_size": 257}, r"tok_embeddings.weight is \(258, 16\) there and \(257, 16\) here"),
    ):
        target = Classifier(replace(ClassifierConfig(**SIZES, vocab_size=258), **changes))
        with pytest.raises(ValueError, match=message):
            init_from(target, tmp_path / "mlm")


def test_wrong_runs(data: PairData):
    with pytest.raises(ValueError, match=r"data\.seq_len 64 is above model\.max_seq_len 32"):
        config_of(data, model=replace(ClassifierConfig(**SIZES), max_seq_len=32))
