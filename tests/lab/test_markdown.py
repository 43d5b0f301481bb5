import json

from normstream.cli import main
from normstream.lab.markdown import markdown_page, markdown_table


def test_has_means_deviations_and_what_broke(made_up_summary):
    losses = {
        ("pre", 0.002): [2.0, 2.2, 2.4],  # mean 2.2, deviation sqrt((0.04 + 0 + 0.04) / 2) = 0.2
        ("pre", 0.01): [None, 3.0, 3.5],  # mean 3.25, deviation sqrt(2 * 0.0625 / 1) = 0.354
        ("siamese", 0.002): [1.5, 1.5, 1.5],
        ("siamese", 0.01): [1.0, 1.0, 1.0],
        ("post", 0.01): [None, None, None],
    }
    summary = made_up_summary(losses)
    for run in summary["runs"]:
        run["diverged"] = run["val_loss"] is None
        run["collapsed"] = run["val_loss"] == 3.5
        if (run["placement"], run["lr"]) == ("siamese", 0.01):
            run["status"] = "out_of_memory"
    failed = "3.250 \u00b1 0.354, diverged in 1 of 3, collapsed in 1 of 3"
    assert markdown_table(summary).splitlines() == [
        "| placement | parameters | 0.002 | 0.01 | largest stable rate |",
        "|---|---|---|---|---|",
        f"| `pre` | 612,864 | 2.200 \u00b1 0.200 | {failed} | 0.002 |",
        "| `siamese` | 616,064 | **1.500** \u00b1 0.000 | - | 0.002 |",
        "| `post` | 612,864 | - | -, diverged in 3 of 3 | none |",
    ]


def test_many_are_sorted_by_their_best_loss(many_summary):
    names = [line.split("`")[1] for line in markdown_table(many_summary).splitlines()[2:]]
    assert names == ["p0", "p1", "p3", "pre", "p5", "p6", "siamese", "p8", "p9", "post"]


def test_page_has_the_order_by_largest_stable_rate(many_summary):
    page = markdown_page(many_summary)
    assert page.startswith("# Comparison: 10 placements, 2 learning rates, 2 seeds\n")
    for line in (
        "* 0.01: `p0`, `p1`, `pre`, `siamese`, `p9`",
        "* 0.001: `p3`, `p5`, `p6`, `p8`",
        "* none: `post`",
        "* Date: 2026-01-31",
        "* Versions: normstream 0.1.0, python 3.11.2 and torch 2.13.0",
        "* Machine: platform Linux x86_64, threads 2",
        "* Each run: 300 steps, 307,200 tokens",
        "normstream compare",
    ):
        assert f"\n{line}\n" in page
    for word in ("Diverged", "Collapsed", "Largest stable rate"):
        assert f"* **{word}**: " in page
    assert markdown_table(many_summary) in page


def test_page_is_written_on_demand(many_summary, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(many_summary))
    main(["report", str(tmp_path), "--markdown-page", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == markdown_page(many_summary)
