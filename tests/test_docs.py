"""The README and the pages in docs/: their Python examples run, their command lines are ones that the parser takes."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from normstream import placements
from normstream.cli import parse
from normstream.placements import registry
from normstream.training import TrainConfig, config_to_yaml

ROOT = Path(__file__).parent.parent
FILES = {"README.md": ROOT / "README.md"} | {
    path.relative_to(ROOT / "docs").as_posix(): path for path in sorted(ROOT.glob("docs/**/*.md"))
}
PAGES = {page: path.read_text(encoding="utf-8") for page, path in FILES.items()}


def blocks(language: str) -> list[tuple[str, str]]:
    """The fenced blocks of one language as (page, content)."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.M | re.S)
    return [(page, block) for page, text in PAGES.items() for block in fence.findall(text)]


def commands() -> list[str]:
    """Every `normstream ...` of a shell block or of a code span, without comments, as one line."""
    shell = "\n".join(block for _, block in blocks("bash")).replace("\\\n", " ")
    spans = [span for text in PAGES.values() for span in re.findall(r"`(normstream [a-z][^`\n]*)`", text)]
    lines = [line.strip() for line in (*shell.splitlines(), *spans)]
    return list(dict.fromkeys(line for line in lines if line.startswith("normstream ")))


PYTHON = blocks("python")


@pytest.mark.parametrize(("page", "source"), PYTHON, ids=[f"{p}-{s.strip().splitlines()[0][:40]}" for p, s in PYTHON])
def test_python_example_runs(page: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_PLACEMENTS", dict(registry._PLACEMENTS))  # forgets what an example registers
    exec(compile(source, page, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("command", commands())
def test_command_line_is_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Path("runs/first/config.yaml")  # the file that examples of --config name
    config.parent.mkdir(parents=True)
    config.write_text(config_to_yaml(TrainConfig()), encoding="utf-8")
    argv = shlex.split(command, comments=True)[1:]
    if "--help" in argv:
        with pytest.raises(SystemExit) as end:
            parse(argv)
        assert end.value.code == 0
    else:
        assert callable(parse(argv))


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(navigation) == sorted(PAGES.keys() - {"README.md"})


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(PAGES[page])):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = FILES[page].parent / file if file else FILES[page]
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


def anchors(text: str) -> list[str]:
    """The anchors of a page's headings, as GitHub and the built pages make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("name", placements.names())
def test_every_placement_has_a_section_with_every_option(name: str) -> None:
    """And a row in the table of all, with its initialization; an option's default comes first in its row."""
    overview = re.findall(rf"^\| \[`{name}`\].*$", PAGES["placements.md"], re.M)
    assert len(overview) == 1
    placement = placements.get(name)
    assert f"| `{placement.init}` |" in overview[0]
    sections = [
        found for text in PAGES.values() for found in re.findall(rf"^## `{name}`$.*?(?=^## |\Z)", text, re.M | re.S)
    ]
    assert len(sections) == 1
    for option in fields(placement):
        default = getattr(placement, option.name)
        written = str(default).lower() if isinstance(default, bool) else str(default)
        assert f"| `{option.name}` | `{written}`" in sections[0], option.name
