"""Metrics besides the loss, stacks of layers and files of runs, in tables, sentences, pictures and pages."""

import base64
import csv
import io
import statistics
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.html_page import Page

from normstream.lab.artifacts import galleries
from normstream.lab.conclusion import sentences
from normstream.lab.live import LiveTable, PlainLines, RunState
from normstream.lab.markdown import markdown_page
from normstream.lab.plots import pictures
from normstream.lab.report import render
from normstream.lab.summary import table, write_summary
from normstream.tasks import get_task

LOSSES = {
    ("pre", 0.002): [0.4, 0.5],
    ("siamese", 0.002): [0.3, 0.2],
    ("pre", 0.01): [0.9, 0.8],
    ("siamese", 0.01): [0.6, 0.7],
}
ACCURACY = {("pre", 0.002): [90.0, 91.0], ("siamese", 0.002): [95.5, 96.5], ("pre", 0.01): [80.0, 82.0]}


@pytest.fixture
def images(made_up_summary: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A comparison on images; siamese at 0.01 has no accuracy yet."""
    summary = made_up_summary(LOSSES)
    summary["task"] = "vision"
    summary["data"] |= {"source": "digits", "tokenizer": None, "unit": "images", "train_size": 1437}
    for run in summary["runs"]:
        values = ACCURACY.get((run["placement"], run["lr"]))
        if values is not None:
            run["metrics"] = {"accuracy": values[run["seed"]]}
            run["curve"]["val_metrics"] = {"accuracy": [values[run["seed"]]] * len(run["curve"]["val_step"])}
    return summary


def test_table_has_mean_and_deviation(images: dict[str, Any]):
    found = {(row["placement"], row["lr"]): row["metrics"]["accuracy"] for row in table(images)}
    for group, values in ACCURACY.items():
        assert found[group] == {"mean": statistics.fmean(values), "std": pytest.approx(statistics.stdev(values))}
    assert found["siamese", 0.01] == {"mean": None, "std": None}


def test_csv_has_a_column_after_the_loss(images: dict[str, Any], tmp_path: Path):
    write_summary(images, tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "summary.csv").read_text())))
    assert list(rows[0])[4:6] == ["val_loss", "accuracy"]
    assert [row["accuracy"] for row in rows if row["placement"] == "pre"] == ["90.0", "91.0", "80.0", "82.0"]


def test_conclusion_has_one_sentence_more(images: dict[str, Any]):
    said = [sentence for sentence in sentences(images) if "Accuracy" in sentence]
    assert said == [
        "Accuracy (%) (higher is better), each at the learning rate of its lowest loss: SiameseNorm 96.0 \u00b1 0.7 "
        "and Pre-Norm 90.5 \u00b1 0.7."
    ]
    assert not [sentence for sentence in sentences(images | {"task": "lm"}) if "ccuracy" in sentence]


def test_of_a_measure_that_is_better_low_the_lowest_comes_first(images: dict[str, Any]):
    images["task"] = "diffusion"
    for run in images["runs"]:
        run["metrics"] = {"fid": 30.0 if run["placement"] == "pre" else 20.0}
    (said,) = [sentence for sentence in sentences(images) if "FID" in sentence]
    assert said.startswith("FID (own classifier) (lower is better)")
    assert said.index("SiameseNorm 20.0") < said.index("Pre-Norm 30.0")


def test_report(images: dict[str, Any]):
    html = render(images)
    Page(html)
    for text in (
        "96.0 \u00b1 0.7",
        "90.5 \u00b1 0.7",
        "2,400 images",
        "digits, 1,437 training images",
        "how frequent each class is",
    ):
        assert text in html, text
    assert "tokenizer" not in html.partition('<dl class="settings">')[0]
    assert "nats per token" not in html
    assert "Accuracy (%) while training" in html
    assert "tokens are the positions that the model works on" in html


def test_a_loss_without_a_unit(images: dict[str, Any]):
    html, page = render(images | {"task": "diffusion"}), markdown_page(images | {"task": "diffusion"})
    assert "Noise MSE is at the end of training" in html
    assert "## Final noise MSE" in page
    assert "nats" not in html + page


def test_markdown_page(images: dict[str, Any]):
    page = markdown_page(images)
    assert "In nats, mean" in page
    assert "## Final accuracy (%)\n\nHigher is better" in page
    assert "| placement | 0.002 | 0.01 |\n|---|---|---|\n| `pre` | 90.5 \u00b1 0.7 | 81.0 \u00b1 1.4 |" in page
    assert "| `siamese` | 96.0 \u00b1 0.7 | - |" in page
    assert "top-5" not in page, "no run has it"
    assert "digits, 1,437 training images, hash" in page


def test_live_lines_and_table():
    metric = get_task("vision").metrics[0]
    said: list[str] = []
    state = RunState("pre", 0.002, 0, steps=10, metric=metric)
    with PlainLines([state], print=said.append) as lines:
        lines.start(0)
        lines.row({"kind": "train", "step": 1, "loss": 2.0, "grad_norm": 0.5, "tokens_per_second": 9.0})
        lines.row({"kind": "eval", "step": 1, "loss": 1.5, "accuracy": 61.25})
    assert "validation 1.500, accuracy (%) 61.2, gradient norm" in said[-1]
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    table = LiveTable([state, RunState("post", 0.002, 0, steps=10, metric=metric)], console)
    with console.capture() as capture:
        console.print(table.render())
    header, first, second, *_ = capture.get().splitlines()
    assert header.index("best val") < header.index("accuracy (%)") < header.index("grad norm")
    assert "61.2" in first
    assert "61.2" not in second


def test_two_stacks_have_panels_of_their_own(made_up_summary: Callable[..., dict[str, Any]]):
    """An encoder of two layers and a decoder of three: gradients are numbered through, and drawn by stack."""
    summary = made_up_summary({("pre", 0.002): [2.0], ("siamese", 0.002): [1.9]})
    summary["task"] = "translation"
    for run in summary["runs"]:
        streams = ("x", "y") if run["placement"] == "siamese" else ("x",)
        sizes = {"encoder": 3, "decoder": 4}
        rms = {f"{stack}.{stream}": [1.0 + i for i in range(n)] for stack, n in sizes.items() for stream in streams}
        run["layers"] = {"step": 300, "grad_norm": [1.0, 2.0, 10.0, 20.0, 30.0], "rms": rms}
    drawn = {picture.name: picture for picture in pictures(summary)}
    for name in ("gradient-by-layer", "rms-by-layer", "stream-ratio"):
        headings = [panel.heading for panel in drawn[name].panels]
        assert headings == ["learning rate 0.002, encoder", "learning rate 0.002, decoder"]
    encoder, decoder = (panel.svg for panel in drawn["gradient-by-layer"].panels)
    assert "Pre-Norm 2 and SiameseNorm 2." in encoder
    assert "Pre-Norm 30 and SiameseNorm 30." in decoder
    encoder, decoder = (panel.svg for panel in drawn["rms-by-layer"].panels)
    assert "SiameseNorm, x stream 3 and SiameseNorm, y stream 3." in encoder
    assert "SiameseNorm, x stream 4 and SiameseNorm, y stream 4." in decoder
    assert [key.label for key in drawn["rms-by-layer"].keys] == [
        "Pre-Norm",
        "SiameseNorm, x stream",
        "SiameseNorm, y stream",
    ]
    Page(render(summary))


def png(shade: int) -> bytes:
    """A picture of one grey pixel, by the PNG specification."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    pixel = zlib.compress(bytes([0, shade]))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")


def test_one_picture_of_each_placement_at_its_best_rate(images: dict[str, Any], tmp_path: Path):
    images["task"] = "diffusion"
    for i, run in enumerate(images["runs"]):
        (tmp_path / run["path"]).mkdir()
        (tmp_path / run["path"] / "samples.png").write_bytes(png(i))
    page = Page(render(images, tmp_path))
    shown = [tag["src"].partition("base64,")[2] for kind, tag in page.tags if kind == "img"]
    best = [i for i, run in enumerate(images["runs"]) if run["lr"] == 0.002 and run["seed"] == 0]
    assert {base64.b64decode(data) for data in shown} == {png(i) for i in best}
    assert len(shown) == 2
    assert not [kind for kind, _ in Page(render(images)).tags if kind == "img"]


def test_first_lines_of_a_table(images: dict[str, Any], tmp_path: Path):
    images["task"] = "translation"
    run = images["runs"][0]
    (tmp_path / run["path"]).mkdir()
    lines = ["source\treference\thypothesis", *(f'{i} <b>\teins "{i}\tzwei' for i in range(50))]
    (tmp_path / run["path"] / "translations.tsv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (gallery,) = galleries(images, tmp_path)
    (shown,) = gallery.shown
    assert shown.rows[:2] == (("source", "reference", "hypothesis"), ("0 <b>", 'eins "0', "zwei"))
    assert len(shown.rows) == 9
    html = render(images, tmp_path)
    Page(html)
    assert "0 &lt;b&gt;" in html
