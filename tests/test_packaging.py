"""What a user gets from `pip install`, and that the files around the code agree with each other."""

import importlib.metadata
import importlib.resources
import re
import tomllib
from pathlib import Path

import pytest

import normstream

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = PYPROJECT["dependencies"]
EXTRAS = PYPROJECT["optional-dependencies"]


def project_name(requirement: str) -> str:
    """The package's name in a requirement, normalized: `PyYAML>=6.0` is `pyyaml`."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def pinned() -> dict[str, str]:
    """The versions in constraints.txt by normalized name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {project_name(name): version for name, version in pins}


def documented() -> dict[str, list[str]]:
    """The packages that have a reason in docs/dependencies.md, by section: "core" or the extra's name."""
    sections: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## (?:Core|Extra `(\w+)`)", line):
            packages = sections.setdefault(heading[1] or "core", [])
        elif row := re.fullmatch(r"\| `([\w-]+)` \| \S.* \|", line):
            packages.append(project_name(row[1]))
    return sections


def test_version_is_the_installed_one() -> None:
    assert normstream.__version__ == importlib.metadata.version("normstream")


def test_types_are_shipped() -> None:
    assert importlib.resources.files("normstream").joinpath("py.typed").is_file()


def test_console_script_resolves() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="normstream")
    assert script.value == "normstream.cli:main"
    assert callable(script.load())


@pytest.mark.parametrize("section", ["core", *EXTRAS])
def test_every_dependency_is_pinned_and_has_a_reason(section: str) -> None:
    packages = [project_name(requirement) for requirement in (CORE if section == "core" else EXTRAS[section])]
    unpinned = {"triton"}  # a CUDA build of torch asks for a version of its own
    assert [name for name in packages if name not in pinned() | dict.fromkeys(unpinned)] == []
    assert sorted(documented()[section]) == sorted(packages)


def test_no_undeclared_extra_is_documented() -> None:
    assert set(documented()) == {"core", *EXTRAS}


def test_pins_name_no_build_of_torch() -> None:
    assert pinned()["torch"] == "2.13.0"
    assert [version for version in pinned().values() if "+" in version] == []
