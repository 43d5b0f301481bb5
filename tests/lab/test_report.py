import re
import shutil
import subprocess
from pathlib import Path

import matplotlib as mpl
import pytest
from tests.html_page import Page

from normstream.lab.conclusion import sentences
from normstream.lab.report import render, write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PICTURES = (
    *("validation-loss", "loss-by-rate", "gradient-norm"),
    *("gradient-by-layer", "rms-by-layer", "stream-ratio"),
)


@pytest.fixture(scope="module")
def html(made_up_summary) -> str:
    return render(made_up_summary())


def test_needs_nothing_from_outside(html):
    page = Page(html)
    assert not page.open
    assert "://" not in html
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "img", "object", "embed"}
    assert page.having("src") == []
    assert all(href.startswith(("#", "data:")) for href in page.having("href"))
    assert len(html.encode()) < 1_500_000


def test_has_every_picture_with_a_description(html):
    page = Page(html)
    assert [i for i in page.having("id") if i in PICTURES] == list(PICTURES)
    labels = [a["aria-label"] or "" for tag, a in page.tags if tag == "svg" and a.get("role") == "img"]
    assert len(labels) == 2 * 5 + 1  # a panel for each learning rate, and one picture over all rates
    assert all(labels)
    assert "at the right end Pre-Norm 2.33, Post-Norm 2.22 and SiameseNorm 2.12." in labels[0]


def test_ids_are_unique_and_references_resolve(html):
    ids = Page(html).having("id")
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([\w-]+)', html)) <= set(ids)


def test_text_in_pictures_is_text(html):
    assert "validation loss (nats per token)</text>" in html
    assert "DejaVu" not in re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


def test_says_where_it_comes_from(html):
    for text in ("0123456789abcdef" * 4, "17,345,678", "307,200 tokens", "2.13.0", "normstream compare", "616,064"):
        assert text in html
    assert "2.120 &plusmn; 0.016" in html
    assert "<dt>model.dim</dt><dd>64</dd>" in html


def test_is_the_same_for_the_same_summary(html, summary):
    assert render(summary) == html


def test_readers_matplotlib_settings_do_not_matter(html, summary):
    with mpl.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        assert render(summary) == html


def test_escapes_what_it_shows(summary):
    summary["runs"][0]["cause"] = summary["command"] = "<script>alert(1)</script>"
    assert "<script" not in render(summary)


def test_headline_follows_the_numbers(html, made_up_summary):
    assert "<h1>SiameseNorm learns best" in html
    flipped = made_up_summary({("pre", 0.01): [2.0, 2.1], ("siamese", 0.01): [2.5, 2.4]})
    assert "<h1>Pre-Norm learns best" in render(flipped)


def test_without_two_streams_there_is_no_ratio(made_up_summary):
    html = render(made_up_summary({("pre", 0.01): [2.0], ("post", 0.01): [2.1]}))
    assert 'id="rms-by-layer"' in html
    assert 'id="stream-ratio"' not in html


def test_of_a_comparison_that_has_only_begun(summary):
    for run in summary["runs"]:
        run |= {"status": "pending", "val_loss": None, "steps": None, "layers": None, "seconds": None, "spikes": None}
        run["curve"] = {key: [] for key in run["curve"]}
    html = render(summary)
    assert "<h1>No run has finished yet.</h1>" in html
    assert "<figure" not in html


def test_of_runs_that_all_broke_early(made_up_summary):
    summary = made_up_summary({("pre", 0.1): [None, None], ("siamese", 0.1): [None, None]})
    for run in summary["runs"]:
        run |= {"diverged": True, "diverged_step": 1, "cause": "training loss is nan", "layers": None}
        run |= {"best_val_loss": None, "train_loss": None, "max_grad_norm": None}
        run["curve"] = {"step": [1], "train_loss": [None], "grad_norm": [None], "val_step": [], "val_loss": []}
    html = render(summary)
    assert "diverged at step 1" in html
    assert "A cross diverged in at least one seed" in html


def test_with_many_placements_and_one_rate(made_up_summary):
    names = ["pre", "post", "siamese", "siamese_hybrid_pre", *(f"other_{i}" for i in range(8))]
    html = render(made_up_summary({(name, 0.002): [2.0 + 0.01 * i] for i, name in enumerate(names)}))
    assert "SiameseNorm (hybrid-pre)" in html
    assert "other_7" in html


def test_many_placements_are_a_matrix(many_summary, html):
    assert 'class="matrix"' not in html
    text = render(many_summary)
    page = Page(text)
    assert not page.open
    assert text.count("<details>") == 2  # the table by learning rate and that of every run
    assert text.index('class="matrix"') < text.index("<details>")
    cells = re.findall(r"<td[^>]*>(.*?)\s*</td>", text[: text.index("<details>")], flags=re.DOTALL)
    assert cells[:4] == [
        "<b>2.000</b> <small>&plusmn; 0.014</small>",
        "<b>1.950</b> <small>&plusmn; 0.014</small>",
        *("0.01", "612,864"),
    ]
    assert "2.800<br><small>diverged 1/2</small>" in cells
    assert text.count("<small>collapsed 1/2</small>") == 4
    assert text.count("<small>collapsed 2/2</small>") == 1
    assert "Largest stable rate</strong>: going up from the smallest learning rate tried" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the report in")
def test_opens_in_a_browser(summary, tmp_path):
    write_report(summary, tmp_path / "report.html")
    dom = dumped(tmp_path / "report.html")
    assert f"<h1>{sentences(summary)[0]}</h1>" in dom
    assert dom.count('<svg role="img"') == 11
    assert dom.rstrip().endswith("</html>")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the report in")
@pytest.mark.parametrize(("width", "size"), [(320, "few"), (390, "few"), (390, "many")])
def test_fits_the_width_of_a_screen(summary, many_summary, tmp_path, width, size):
    summary = many_summary if size == "many" else summary
    summary["command"] = "normstream compare --data " + "a-long-name/" * 20
    write_report(summary, tmp_path / "report.html")
    frame = f'<iframe src="report.html" style="width: {width}px; height: 844px; border: 0"></iframe>'
    script = (
        "onload = () => { const root = frames[0].document.documentElement;"
        "document.title = root.scrollWidth - root.clientWidth }"
    )
    (tmp_path / "frame.html").write_text(f"<!doctype html><title>none</title>{frame}<script>{script}</script>")
    dom = dumped(tmp_path / "frame.html", "--allow-file-access-from-files")
    assert "<title>0</title>" in dom


def dumped(page: Path, *more: str) -> str:
    """The document that a browser makes of a page."""
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom "
        f"--disable-component-update --disable-sync --user-data-dir={page.with_name('profile')} --window-size=390,844"
    ).split()
    command = [str(CHROMIUM), *options, *more, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
