"""Every sentence must follow from the numbers: change the numbers and the sentence changes."""

import pytest

from normstream.lab.conclusion import conclusion, sentences

ONE_RATE = {("pre", 0.002): [2.30, 2.32], ("siamese", 0.002): [2.10, 2.14]}


def test_headline_names_the_lowest_loss_at_each_ones_best_rate(summary):
    headline, evidence, *_ = sentences(summary)
    # (2.05 + 2.30 + 1.97 + 2.02 + 2.10) / 5 = 2.088 and (2.22 + 2.25 + 2.20 + 2.21 + 2.24) / 5 = 2.224
    assert headline == (
        "SiameseNorm learns best: validation loss 2.088 at learning rate 0.01, against 2.224 for Post-Norm at 0.002."
    )
    # seed 1 of SiameseNorm, 2.30, is above seed 1 of Post-Norm, 2.25
    assert evidence == (
        "Each at its best learning rate, SiameseNorm leads Post-Norm by 0.136 on average over 5 seeds; it is "
        "lower in 4 of 5 seeds, and the lead is larger than the spread over seeds (standard deviation 0.128)."
    )


def test_ranks_every_learning_rate(summary):
    text = conclusion(summary)
    assert (
        "At learning rate 0.002: SiameseNorm 2.120 \u00b1 0.016, Post-Norm 2.224 \u00b1 0.021, Pre-Norm 2.330" in text
    )
    assert "At learning rate 0.01: SiameseNorm 2.088 \u00b1 0.128, Pre-Norm 2.498 \u00b1 0.040, Post-Norm 3.224" in text
    assert "(lead 0.104 in 5 of 5 seeds, larger than the spread)" in text


def test_flips_when_pre_norm_wins(made_up_summary):
    swapped = made_up_summary(
        {
            ("pre", 0.002): [2.12, 2.14],
            ("post", 0.002): [2.22, 2.25],
            ("siamese", 0.002): [2.31, 2.35],
            ("pre", 0.01): [2.05, 2.06],
            ("post", 0.01): [2.61, 2.60],
            ("siamese", 0.01): [3.23, 3.24],
        }
    )
    text = conclusion(swapped)
    assert text.startswith("Pre-Norm learns best: validation loss 2.055 at learning rate 0.01, against 2.235 for Post")
    assert "SiameseNorm collapsed at learning rate 0.01 in 2 of 2 seeds." in text
    assert "Post-Norm collapsed" not in text


@pytest.mark.parametrize("winner", ["first", "second", "third"])
def test_no_name_is_hard_wired(made_up_summary, winner):
    names = ["first", "second", "third"]
    text = conclusion(made_up_summary({(name, 0.01): [2.0 if name == winner else 2.5] * 2 for name in names}))
    assert text.startswith(f"{winner} learns best")
    assert "Norm" not in text


def test_one_seed_has_no_known_spread(made_up_summary):
    text = conclusion(made_up_summary({key: losses[:1] for key, losses in ONE_RATE.items()}))
    assert text.startswith(
        "In one seed, SiameseNorm has the lowest validation loss: 2.100 at learning rate 0.002, against"
    )
    assert "SiameseNorm leads Pre-Norm by 0.200; one seed: no spread known." in text
    assert "\u00b1" not in text


def test_a_lead_within_the_spread_is_no_win(made_up_summary):
    text = conclusion(made_up_summary({("pre", 0.002): [2.0, 2.2], ("post", 0.002): [2.1, 2.15]}))
    assert text.startswith("No clear winner: Pre-Norm (2.100 at learning rate 0.002) leads Post-Norm by less than")
    assert "it is lower in 1 of 2 seeds, and the lead is not larger than the spread" in text


def test_a_tie_is_no_win(made_up_summary):
    text = conclusion(made_up_summary({("pre", 0.002): [2.0], ("post", 0.002): [2.0]}))
    assert text.startswith("No clear winner: Pre-Norm and Post-Norm both reach 2.000.")


def test_a_run_without_a_loss_cannot_win(made_up_summary):
    summary = made_up_summary({("pre", 0.002): [2.3, 2.4], ("post", 0.002): [1.9, None]})
    summary["runs"][3] |= {"diverged": True, "diverged_step": 17, "cause": "training loss is nan"}
    text = conclusion(summary)
    assert text.startswith("Pre-Norm alone keeps a finite loss in every seed: validation loss 2.350")
    assert "Pre-Norm is lower than Post-Norm in 1 of 2 seeds" in text
    assert "Post-Norm diverged at learning rate 0.002 in 1 of 2 seeds." in text


def test_nobody_wins_when_all_break(made_up_summary):
    collapsed = made_up_summary({("pre", 0.1): [3.24], ("post", 0.1): [3.25]})
    assert conclusion(collapsed).startswith("No placement learned more than how frequent each token is")
    diverged = made_up_summary({("pre", 0.1): [None], ("post", 0.1): [None]})
    assert conclusion(diverged).startswith("No placement kept a finite loss in every seed")


def test_says_what_is_unfinished_and_compares_only_shared_seeds(made_up_summary):
    summary = made_up_summary(ONE_RATE)
    summary["runs"][1]["status"] = "pending"  # Pre-Norm, seed 1
    text = conclusion(summary)
    assert text.startswith("So far: in one seed, SiameseNorm has the lowest validation loss: 2.100")
    assert "Unfinished: 1 of 4 runs missing, so this can still change." in text
    summary["runs"][1]["status"] = "out_of_memory"
    assert "Out of memory: Pre-Norm." in conclusion(summary)


def test_with_too_little_to_compare(made_up_summary):
    summary = made_up_summary(ONE_RATE)
    for run in summary["runs"]:
        run["status"] = "pending"
    assert conclusion(summary).startswith("No run has finished yet.")
    summary["runs"][0]["status"] = "finished"
    assert conclusion(summary).startswith("Only Pre-Norm has finished runs: validation loss 2.300")
    summary["runs"][3]["status"] = "finished"
    assert conclusion(summary).startswith("The placements share no finished seed yet")


def test_says_so_when_nothing_broke(made_up_summary):
    assert "No run diverged or collapsed." in conclusion(made_up_summary(ONE_RATE))


def test_many_placements_are_counted_and_not_listed(many_summary):
    assert sentences(many_summary) == [
        "p0 learns best: validation loss 1.950 at learning rate 0.01, against 2.050 for p1 at 0.01.",
        # deviation of two values 0.02 apart: 0.02 / sqrt(2) = 0.014
        "The three lowest of 9, each at its best rate: p0, 1.950 \u00b1 0.014 at 0.01; p1, 2.050 \u00b1 0.014 at 0.01; "
        "p3, 2.300 \u00b1 0.014 at 0.001.",
        "Pre-Norm is 4th (2.350 at 0.01), SiameseNorm is 7th (2.650 at 0.01) and Post-Norm failed at every rate.",
        "Diverged in at least one seed: p8 at 0.01.",
        "4 placements collapsed in at least one seed: 1 at 0.001 and 4 at 0.01. Collapsed means: the final validation "
        "loss is not 0.05 below that of knowing only how frequent each token is, 3.250.",
        "Largest stable learning rate: 0.01 for 5 (Pre-Norm and SiameseNorm "
        "among them); 0.001 for 4; none for Post-Norm.",
    ]


def test_many_placements_at_one_rate_and_seed(made_up_summary):
    text = conclusion(made_up_summary({(f"p{i}", 0.01): [2.0 + 0.1 * i] for i in range(9)}))
    assert text == (
        "In one seed, p0 has the lowest validation loss: 2.000 at learning rate 0.01, against 2.100 for p1. "
        "The three lowest of 9: p0, 2.000; p1, 2.100; p2, 2.200. No run diverged or collapsed."
    )


def test_many_placements_that_have_only_begun(many_summary):
    for run in many_summary["runs"]:
        run["status"] = "pending"
    assert conclusion(many_summary).startswith("No run has finished yet.")
    many_summary["runs"][0]["status"] = "finished"
    assert conclusion(many_summary).startswith("Only p0 has finished runs")


def test_many_placements_that_all_break(made_up_summary):
    text = conclusion(made_up_summary({(f"p{i}", 0.1): [3.24, 3.25] for i in range(9)}))
    assert text.startswith("No placement learned more than how frequent each token is, so none can be called better.")
    assert "9 placements collapsed in at least one seed: 9 at 0.1." in text
