"""The same command line, files and report for every task: small comparisons of each, from its own default data."""

import csv
import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from tests.html_page import Page

from normstream.cli import main, parse
from normstream.commands import EXTRAS
from normstream.models import PRESETS
from normstream.tasks import TASKS
from normstream.tasks.output import OUTPUT
from normstream.training import find_checkpoint, load_model, read_checkpoint_config
from normstream.training.config import resolve

SMALL = "--steps 2 --batch-size 4 --schedule.warmup 0 --eval-every 1 --eval-batches 1 --stats-every 1 --device cpu"
MODEL = "--model.dim 16 --model.n-heads 2 --model.n-layers 1 --model.ffn-dim 16"
OWN = {
    "lm": "--data text.txt --data.seq-len 16 --data.validation-fraction 0.2",
    "mlm": "--data text.txt --data.seq-len 16 --data.validation-fraction 0.2",
    "classification": "",
    "translation": "--data.n-pairs 60 --data.decoding.n-pairs 3 --data.decoding.beam-size 1",
    "vision": "",
    "diffusion": "--data.max-images 40 --data.samples 6 --data.shown 1 --data.sampling.steps 2 --ema 0.5",
}
LEFT = {"translation": "translations.tsv", "diffusion": "samples.png"}


def command(line: str) -> str:
    said = io.StringIO()
    with redirect_stdout(said):
        main(line.split())
    return said.getvalue()


@pytest.fixture(scope="module", params=list(TASKS))
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A task, and the folder of a comparison of two placements in it."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        command(
            f"compare --task {request.param} --placements pre siamese {SMALL} {MODEL} {OWN[request.param]} --out out"
        )
    return request.param, folder / "out"


def test_files_have_one_shape(compared: tuple[str, Path]):
    name, out = compared
    task, summary = TASKS[name], json.loads((out / "summary.json").read_text())
    assert (summary["task"], summary["data"]["unit"]) == (name, task.unit)
    assert summary["lrs"] == list(task.lrs)
    names = {metric.name for metric in task.metrics} - (
        {"top5_accuracy"} if name == "vision" else set()
    )  # of 10 digits
    for run in summary["runs"]:
        result = json.loads((out / run["path"] / "result.json").read_text())
        assert run["metrics"] == result["metrics"]
        assert names == run["metrics"].keys()
        assert run["baseline_loss"] == summary["data"]["baseline_loss"] == result["baseline_loss"]
    with open(out / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [[float(row[key]) for key in sorted(names)] for row in rows] == [
        [run["metrics"][key] for key in sorted(names)] for run in summary["runs"]
    ]


def test_report_speaks_of_the_task(compared: tuple[str, Path]):
    name, out = compared
    task, html = TASKS[name], (out / "report.html").read_text()
    Page(html)
    for metric in task.metrics:
        if metric.name == "top5_accuracy":
            assert metric.title not in html, "ten digits have none"
            continue
        assert html.count(f'<th scope="col">{metric.title}') == 2, "results and every run"
        assert f"For {metric.title}, {'higher' if metric.higher_is_better else 'lower'} is better" in html
    assert (f"that of knowing only {task.baseline}").replace("'", "&#39;") in html
    assert ("nats per token" in html) == (name == "lm")
    assert f"training {task.unit}" in html
    file = LEFT.get(name)
    assert ("artifact-" in html) == (file is not None)
    if file is not None:
        assert all((out / run / file).is_file() for run in [path.name for path in out.iterdir() if path.is_dir()])


def test_evaluation_of_a_run(compared: tuple[str, Path], monkeypatch: pytest.MonkeyPatch):
    """`eval` on as many batches as the run had gives the run's own validation loss."""
    name, out = compared
    monkeypatch.chdir(out.parent)
    run = json.loads((out / "summary.json").read_text())["runs"][0]
    said = command(f"eval out/{run['path']} --batch-size 4 --batches 1 --device cpu")
    found = re.search(r"loss +([\d.e-]+)", said)
    assert found is not None
    assert float(found[1]) == pytest.approx(run["val_loss"], rel=1e-5)
    whole = command(f"eval out/{run['path']} --batch-size 64 --device cpu")
    config = read_checkpoint_config(find_checkpoint(out / run["path"]))
    task = TASKS[name]
    data = task.load(config.data)
    config = resolve(config, data)
    every = task(replace(config, batch_size=64, eval_batches=10**6), data)
    loss = every.evaluate(load_model(out / run["path"]))["loss"]
    found = re.search(r"loss +([\d.e-]+)", whole)
    assert found is not None
    assert float(found[1]) == pytest.approx(loss, rel=1e-5)


def test_commands_refuse_models_of_other_tasks(
    compared: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    name, out = compared
    monkeypatch.chdir(out.parent)
    path = next(path for path in out.iterdir() if path.is_dir())
    others = {word: task for task, word in OUTPUT.items() if task != name}
    for word in others:
        with pytest.raises(SystemExit):
            main([word, str(path)])
        expected = f"task {name}, which normstream {word} is not for; take normstream {OUTPUT.get(name, 'eval')}"
        assert expected in " ".join(capsys.readouterr().err.split())


def test_config_and_resume_bring_the_task(compared: tuple[str, Path], monkeypatch: pytest.MonkeyPatch):
    name, out = compared
    monkeypatch.chdir(out.parent)
    run = next(path for path in out.iterdir() if path.is_dir())
    assert parse(["train", "--config", str(run / "config.yaml")]).run.task == name
    assert parse(["compare", "--resume", "--out", "out"]).plan.base.task == name
    assert yaml.safe_load((run / "config.yaml").read_text())["task"] == name
    other = "vision" if name != "vision" else "lm"
    for line in (["train", "--config", str(run / "config.yaml")], ["compare", "--resume", "--out", "out"]):
        with pytest.raises(ValueError, match=rf"--task {other} contradicts .*config.yaml, whose task is {name}"):
            parse([*line, "--task", other])


@pytest.mark.parametrize("name", list(TASKS))
def test_help_lists_the_options_of_the_task(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["train", "--task", name, "--help"])
    said = capsys.readouterr().out
    for part, kind in (("data", TASKS[name].data_config), ("model", TASKS[name].model_config)):
        for field in fields(kind):
            assert f"--{part}.{field.name.replace('_', '-')}" in said, (part, field.name)
    assert ("--model.window" in said) == (name == "lm"), "no options of other models"
    assert all(preset in said for preset in PRESETS)


def test_an_unknown_task():
    with pytest.raises(ValueError, match=r"unknown task 'visoin'; did you mean 'vision'\?"):
        parse(["train", "--task", "visoin"])


def test_a_preset_implies_its_task():
    assert parse(["compare", "--preset", "moe-tiny"]).plan.base.task == "lm"
    made = parse(["train", "--preset", "deit-t", "--data.image-size", "32", "--model.placement", "pre"]).run
    assert (made.task, made.model.dim, made.model.placement) == ("vision", 192, "pre")


def test_a_preset_of_another_kind_of_model():
    with pytest.raises(ValueError, match=r"deit-s is a ViTConfig, but task lm trains a DecoderConfig; .* tiny, 10m"):
        parse(["train", "--task", "lm", "--preset", "deit-s"])
    with pytest.raises(ValueError, match="task vision trains a ViTConfig; presets that fit: deit-t, deit-s, deit-b"):
        parse(["compare", "--task", "vision", "--preset", "tiny"])


def test_doctor_knows_tasks_and_extras():
    said = " ".join(command("doctor").split())
    assert ", ".join(TASKS) in said
    assert all(f"extra [{extra}]" in said for extra in EXTRAS)
