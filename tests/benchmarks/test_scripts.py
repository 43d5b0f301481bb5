"""Each script runs at a tiny size and writes what it promises; nothing is said of how long anything takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.harness import quartiles
from benchmarks.junction_targets import at_size
from benchmarks.shapes import SHAPES

from benchmarks import junctions, page, scaling, step, step_targets
from normstream.ops import status

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
COMMON: dict[str, Any] = {"device": "cpu", "threads": 1, "tuned_allocator": False}


def read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    assert str(Path.cwd()) not in text
    record = json.loads(text)
    assert {"machine", "versions", "date", "commit", "settings", "skipped", "targets", "rows"} <= record.keys()
    assert record["versions"]["torch"] == torch.__version__
    assert path.name == f"{record['benchmark']}-{record['machine_class']}.json"
    return record


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result files of all three scripts."""
    out = tmp_path_factory.mktemp("results")
    common = COMMON | {"out": out, "rounds": 3}
    few: dict[str, Any] = {"placements": ("pre", "siamese"), "variants": ("ours", "eager", "liger")}
    both: Any = ("fp32", "mixed")
    limits = torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False)  # scripts change them
    with limits, pytest.MonkeyPatch.context() as patch:
        junctions.main(junctions.Settings(sizes=("64x32", "32x16"), precisions=both, least_ms=0.0, **few, **common))
        step.main(step.Settings(size="tiny", variants=("*/plain/eager", "*/ops/eager", "official/*"), **common))
        patch.setitem(scaling.BASE, "cpu", TINY)
        scaling.main(scaling.Settings(axes=("n_layers",), largest=12, **common))
    return out


def test_junctions_script(results: Path) -> None:
    record = read(next(results.glob("junctions-*")))
    rows = [row for row in record["rows"] if "placement" in row]
    ours = ["ours"] if "compiled" in status()["cpp"] else []
    assert {row["variant"] for row in rows} == {*ours, "eager"}
    assert {(row["size"], row["precision"]) for row in rows} == {
        (size, precision) for size in ("64x32", "32x16") for precision in ("fp32", "mixed")
    }
    assert any("liger" in what for what in record["skipped"])
    row = next(row for row in rows if row["placement"] == "siamese" and row["precision"] == "fp32")
    assert row["units"] == {"forward": 7, "backward": 8}
    assert row["least_bytes"] == {"forward": 7 * 64 * 32 * 4, "backward": 8 * 64 * 32 * 4}
    assert all(len(samples) == 3 and min(samples) > 0 for samples in row["seconds"].values())
    copies = [row for row in record["rows"] if "gib_per_second" in row]
    assert len(copies) == 2 * 4
    best = [
        max(
            2 * 64 * 32 * 4 / copy["seconds"][i]
            for copy in copies
            if (copy["size"], copy["precision"]) == ("64x32", "fp32")
        )
        for i in range(3)
    ]
    both = [sum(samples) for samples in zip(row["seconds"]["forward"], row["seconds"]["backward"], strict=True)]
    expected = quartiles([15 * 64 * 32 * 4 / time / rate for time, rate in zip(both, best, strict=True)])
    assert row["of_copy_rate"]["both"] == pytest.approx(list(expected), rel=1e-4)
    assert [target["verdict"] for target in record["targets"]] == ["not measured"] * 6


def test_junction_figures_are_compared_where_they_were_measured(results: Path) -> None:
    rows = read(next(results.glob("junctions-*")))["rows"]
    where = " (64x32, fp32)"
    named = {target.label.removesuffix(where): target for target in at_size(rows, "64x32", "fp32", on_gpu=False)}
    if "compiled" in status()["cpp"]:
        assert named["SiameseNorm junction, of the copy rate, forward + backward"].verdict == "missed"
        assert named["`siamese`, bytes kept / (units + numbers of the form)"].values == (1.0,)
    assert named["SiameseNorm junction / Inductor on its formula"].verdict == "not measured"


def test_step_script(results: Path) -> None:
    record = read(next(results.glob("step-tiny-*")))
    rows = {(row["variant"], row["precision"]): row for row in record["rows"] if "mfu" in row}
    assert {"pre/plain/eager", "siamese/plain/eager", "official/eager"} <= {variant for variant, _ in rows}
    for row in rows.values():
        assert set(row["seconds"]) == {"forward", "backward", "update"}
        assert all(len(samples) == 3 and min(samples) > 0 for samples in row["seconds"].values())
        assert 0 < row["mfu"][1] < 2
        assert row["kept_bytes"] > 0
        assert row["peak_bytes"] is None
    step_ms = rows["pre/plain/eager", "fp32"]["ms"]["step"][1]
    tokens = rows["pre/plain/eager", "fp32"]["tokens_per_second"][1]
    assert tokens * step_ms / 1e3 == pytest.approx(TINY.tokens, rel=1e-6)
    labels = [target["label"] for target in record["targets"]]
    assert len(labels) == len(set(labels))


def test_step_figures_take_the_ratio_round_by_round() -> None:
    def row(variant: str, *seconds: float) -> dict[str, Any]:
        shares, kept = [0.9] * len(seconds), 1125 if variant.startswith("siamese") else 1000
        times = {"forward": list(seconds), "backward": [0.0] * len(seconds)}
        return {"precision": "fp32", "variant": variant, "seconds": times, "shares": shares, "kept_bytes": kept}

    rows = [row("siamese/ops/compiled", 1.0, 20.0, 3.0), row("pre/ops/compiled", 1.0, 10.0, 3.0)]
    found = {target.label: target for target in step_targets.targets(rows, CPU, SHAPES["small"])}
    assert found["step of siamese/ops/compiled / pre/ops/compiled (fp32)"].values == (1.0, 2.0, 1.0)
    assert found["kept bytes of siamese/ops/compiled / pre/ops/compiled (fp32)"].verdict == "reached"
    assert found["MFU of siamese/ops/compiled (fp32)"].verdict == "reached"
    assert "did not run" in found["step of pre/ops/compiled / llama/eager, as documented (fp32)"].reason


def test_scaling_script(results: Path) -> None:
    rows = read(next(results.glob("scaling-*")))["rows"]
    assert [(row["axis"], row["placement"]) for row in rows] == [("n_layers", "pre"), ("n_layers", "siamese")]
    for row in rows:
        assert [point["point"] for point in row["points"]] == [6, 12]
        assert row["points"][1]["shape"]["n_layers"] == 12
        assert 0.7 < row["fits"]["kept_bytes"]["exponent"] <= 1


def test_the_page_is_filled_and_filling_it_again_changes_nothing(results: Path, tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    path.write_text((page.ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), encoding="utf-8")
    settings = page.Settings(results=results, page=path, pictures=tmp_path / "results")
    page.main(settings)
    first = path.read_text(encoding="utf-8")
    pictures = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "results").glob("*.svg")}
    page.main(settings)
    assert path.read_text(encoding="utf-8") == first
    assert {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "results").glob("*.svg")} == pictures
    assert "| `siamese` | 7 + 8 |" in first
    assert "| depth | `pre` | 6, 12 |" in first
    assert {name.split("-")[0] for name in pictures} == {
        "junctions",
        "scaling",
    }  # the step's reference was not measured
    for name in pictures:
        assert f"(results/{name})" in first


def test_a_page_without_a_marker_is_an_error() -> None:
    with pytest.raises(ValueError, match="marker"):
        page.filled("no marker", {"step": "text"})
