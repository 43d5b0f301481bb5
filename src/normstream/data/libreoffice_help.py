"""The source ``libreoffice``: LibreOffice's help in English and German, as Debian packages it.

The help in every language is a tree of HTML files with the same names, and a translated element has the same id as
its original. A pair is usable if

* its element is a paragraph: a ``p`` or a heading ``h1`` to ``h6`` whose id starts with ``par_`` (most
  headings have ids in ``hd_``, and two thirds of these are a text that occurs more than once);
* the id occurs once in the English file and once in the German file of the same name;
* both texts, white space collapsed and line breaks counted as such, have 10 to 300 characters, and they differ (code
  is not translated);
* the same pair has not come up before.

The packages of Debian 12 (LibreOffice 7.4.7) have 26,635 such pairs; one fewer if line breaks did not count.
"""

from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

HELP = Path("/usr/share/libreoffice/help")
"""Where the packages put the help."""
FOLDERS = ("en-US", "de")
NOT_INSTALLED = (
    "the help of LibreOffice in English and German is not in {folder}; on Debian and Ubuntu: "
    "apt-get install libreoffice-help-de libreoffice-help-en-us"
)
FEWEST_CHARACTERS, MOST_CHARACTERS = 10, 300
PARAGRAPHS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6"})
VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"})
"""Elements without an end tag."""


def help_pairs(folder: Path = HELP) -> list[tuple[str, str]]:
    """The usable pairs (English, German) below a folder that holds ``en-US`` and ``de``, in the order of the files.

    Raises ValueError with the command that installs the help if it is not there.

    >>> for language, text in (("en-US", "Choose <b>View</b> - Zoom."), ("de", "Wählen Sie <b>Ansicht</b> - Zoom.")):
    ...     file = getfixture("tmp_path") / language / "text" / "zoom.html"
    ...     file.parent.mkdir(parents=True)
    ...     _ = file.write_text(f'<p id="par_id1">{text}</p>', encoding="utf-8")
    >>> help_pairs(getfixture("tmp_path"))
    [('Choose View - Zoom.', 'Wählen Sie Ansicht - Zoom.')]
    """
    english, german = (folder / name / "text" for name in FOLDERS)
    if not (english.is_dir() and german.is_dir()):
        raise ValueError(NOT_INSTALLED.format(folder=folder))
    pairs: dict[tuple[str, str], None] = {}
    for path in sorted(english.rglob("*.html")):
        other = german / path.relative_to(english)
        if other.is_file():
            sources, targets = paragraphs(_read(path)), paragraphs(_read(other))
            both = ((text, targets[key]) for key, text in sources.items() if key in targets)
            pairs.update(dict.fromkeys(pair for pair in both if is_usable(*pair)))
    return list(pairs)


def is_usable(english: str, german: str) -> bool:
    """Whether both texts have 10 to 300 characters and differ.

    >>> is_usable("Opens a file.", "Öffnet eine Datei."), is_usable("=SUM(A1:A10)", "=SUM(A1:A10)")
    (True, False)
    """
    lengths = len(english), len(german)
    return english != german and all(FEWEST_CHARACTERS <= length <= MOST_CHARACTERS for length in lengths)


def paragraphs(html: str) -> dict[str, str]:
    """The texts of a file's paragraphs by id, white space collapsed; without those whose id occurs more than once.

    >>> paragraphs('<p id="par_1">a <i>b</i><br>c</p><p id="par_2">d</p><p id="par_2">e</p><p>f</p>')
    {'par_1': 'a b c'}
    """
    parser = _Paragraphs()
    parser.feed(html)
    parser.close()
    counts = Counter(key for key, _ in parser.found)
    return {key: text for key, text in parser.found if counts[key] == 1}


class _Paragraphs(HTMLParser):
    """Collects (id, text) of every paragraph; an end tag closes what was left open inside."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, str]] = []
        self._open: list[tuple[str, str | None, list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "br":
            self.handle_data(" ")
        elif tag not in VOID:
            key = dict(attrs).get("id") if tag in PARAGRAPHS else None
            self._open.append((tag, key if key and key.startswith("par_") else None, []))

    def handle_data(self, data: str) -> None:
        for _, key, texts in self._open:
            if key is not None:
                texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        tags = [opened for opened, _, _ in self._open]
        if tag not in tags:
            return
        start = len(tags) - 1 - tags[::-1].index(tag)
        closed, self._open = self._open[start:], self._open[:start]
        self.found += [(key, " ".join("".join(texts).split())) for _, key, texts in closed if key is not None]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
