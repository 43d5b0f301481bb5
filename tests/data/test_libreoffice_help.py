"""LibreOffice's help: a tree written by hand, and the real one where it is installed."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from normstream.data import translation
from normstream.data.libreoffice_help import HELP, help_pairs, paragraphs
from normstream.data.translation import TranslationConfig, load_translation

ENGLISH = """<!DOCTYPE html><html><body><h1 id="hd_1">Opening files</h1>
<p id="par_id1" class="paragraph" dir="auto">Choose <span class="menuitem">File -
  Open</span>.<br>Press &lt;Enter&gt;.</p>
<p id="par_id2">=SUM(A1:A10)</p>
<p id="par_id3">Too short</p>
<p id="par_id4">Only here in English.</p>
<p id="par_id5">Twice in this file.</p><p id="par_id5">Twice in this file, changed.</p>
<h2 id="par_id6"><img src="x.svg" id="par_no">Closing the files</h2>
<div id="par_id7">No paragraph at all.</div>
<p id="par_id8"><p id="par_id9">A paragraph in another one</p></p>
</body></html>"""
GERMAN = """<p id="par_id2">=SUM(A1:A10)</p><p id="par_id3">Auf jeden Fall lang genug</p>
<p id="par_id5">Nur einmal in dieser Datei.</p>
<h2 id="par_id6">Die Dateien schließen</h2><p id="par_id1">Wählen Sie <b>Datei - Öffnen</b>.</p>
<div id="par_id7">Gar kein Absatz hier.</div><p id="par_id9">Ein Absatz in einem anderen</p>
<h1 id="hd_1">Dateien öffnen</h1><p id="par_id10">Nur hier auf Deutsch.</p>"""
OPEN = ("Choose File - Open. Press <Enter>.", "Wählen Sie Datei - Öffnen.")
CLOSE = ("Closing the files", "Die Dateien schließen")
NESTED = ("A paragraph in another one", "Ein Absatz in einem anderen")


def write(folder: Path, language: str, name: str, html: str) -> None:
    path = folder / language / "text" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two files with the same paragraphs, and one that is there in English only."""
    for name in ("swriter/a.html", "scalc/b.html"):
        write(tmp_path, "en-US", name, ENGLISH)
        write(tmp_path, "de", name, GERMAN)
    write(tmp_path, "en-US", "c.html", ENGLISH.replace("Choose", "Click on"))
    return tmp_path


def test_usable_pairs(tree: Path) -> None:
    assert help_pairs(tree) == [OPEN, CLOSE, NESTED]


def test_ids_belong_to_their_file(tree: Path) -> None:
    """The same id means another paragraph in another file."""
    write(tree, "en-US", "d.html", '<p id="par_id1">Paints the cells.</p>')
    write(tree, "de", "d.html", '<p id="par_id1">Malt die Zellen an.</p>')
    assert ("Paints the cells.", "Malt die Zellen an.") in help_pairs(tree)
    assert OPEN in help_pairs(tree)


@pytest.mark.parametrize(("length", "usable"), [(9, False), (10, True), (300, True), (301, False)])
def test_limits_of_length(tmp_path: Path, length: int, usable: bool) -> None:
    write(tmp_path, "en-US", "a.html", f'<p id="par_1">{"x" * length}</p>')
    write(tmp_path, "de", "a.html", f'<p id="par_1">{"y" * 20}</p>')
    assert len(help_pairs(tmp_path)) == usable


def test_unclosed_elements_end_with_what_is_around_them() -> None:
    html = '<div><p id="par_1">one <b>two</div><p id="par_2">three</p> four'
    assert paragraphs(html) == {"par_1": "one two", "par_2": "three"}


def test_as_data(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "help_pairs", lambda: help_pairs(tree))
    config = TranslationConfig(source="libreoffice", tokenizer="bytes", direction="de-en", validation_fraction=0.3)
    data = load_translation(config)
    found = {(pair.source, pair.target) for split in (data.train, data.validation) for pair in split.pairs}
    assert found == {(german, english) for english, german in (OPEN, CLOSE, NESTED)}


def test_not_installed_says_what_to_install(tmp_path: Path) -> None:
    command = "apt-get install libreoffice-help-de libreoffice-help-en-us"
    with pytest.raises(ValueError, match=command):
        help_pairs(tmp_path)
    write(tmp_path, "de", "a.html", GERMAN)
    with pytest.raises(ValueError, match=command):
        help_pairs(tmp_path)


@pytest.mark.skipif(not all((HELP / name).is_dir() for name in ("en-US", "de")), reason="the help is not installed")
def test_the_real_help() -> None:
    """The rule again, with another HTML parser."""
    html = pytest.importorskip("lxml.html")

    def texts(path: Path) -> dict[str, str]:
        root = html.parse(str(path), html.HTMLParser(encoding="utf-8")).getroot()
        for line_break in root.iter("br"):
            line_break.tail = f" {line_break.tail or ''}"
        found = [one for one in root.iter("p", "h1", "h2", "h3", "h4", "h5", "h6") if one.get("id", "")[:4] == "par_"]
        count = Counter(one.get("id") for one in found)
        return {one.get("id"): " ".join(one.text_content().split()) for one in found if count[one.get("id")] == 1}

    expected = set()
    for path in (HELP / "en-US" / "text").rglob("*.html"):
        other = HELP / "de" / path.relative_to(HELP / "en-US")
        if other.is_file():
            english, german = texts(path), texts(other)
            expected |= {(english[key], german[key]) for key in english.keys() & german.keys()}
    expected = {(one, other) for one, other in expected if one != other and {len(one), len(other)} <= {*range(10, 301)}}
    pairs = help_pairs()
    assert len(pairs) == len(expected)
    assert set(pairs) == expected
    if installed_version().startswith("4:7.4.7-"):  # of Debian 12
        assert len(pairs) == 26_635


def installed_version() -> str:
    """Debian's version of the packages; empty where there is no dpkg."""
    if shutil.which("dpkg-query") is None:
        return ""
    asked = ["dpkg-query", "--show", "--showformat=${Version}", "libreoffice-help-de"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout
