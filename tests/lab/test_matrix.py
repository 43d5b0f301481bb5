import pytest

from normstream.lab.matrix import chosen_looks, has_many, matrix
from normstream.lab.style import GREY


def test_rows_are_sorted_by_the_best_loss_without_a_failure(many_summary):
    arranged = matrix(many_summary)
    assert [row.placement for row in arranged.rows] == [
        *("p0", "p1", "p3", "pre", "p5", "p6", "siamese", "p8", "p9", "post")
    ]
    # p3 collapsed at the high rate in one seed, so its best is 2.3 at the low one; Pre-Norm's is 2.35 at the high one
    assert [row.best[1] for row in arranged.rows[:4]] == pytest.approx([1.95, 2.05, 2.3, 2.35])


def test_a_cell_with_a_failure_is_never_the_lowest(made_up_summary):
    summary = made_up_summary({("pre", 0.01): [1.0, 3.24], ("post", 0.01): [2.5, 2.6]})  # means 2.12 and 2.55
    arranged = matrix(summary)
    assert {row.placement: arranged.is_lowest(row.cells[0]) for row in arranged.rows} == {"pre": False, "post": True}


def test_largest_stable_rate_of_each_row(many_summary):
    stable = {row.placement: row.stable_rate for row in matrix(many_summary).rows}
    assert (stable["p0"], stable["p3"], stable["post"]) == (0.01, 0.001, None)


def test_colours_go_by_rank(made_up_summary):
    losses = {("a", 0.01): [2.0], ("b", 0.01): [2.1], ("c", 0.01): [3.0]}
    arranged = matrix(made_up_summary(losses))
    assert [arranged.shade(value) for (value,) in losses.values()] == [1.0, 0.5, 0.0]
    assert arranged.scale() == [(2.0, 1.0), (2.1, 0.5), (3.0, 0.0)]


def test_eight_of_many_have_colours_of_their_own(many_summary):
    looks = chosen_looks(many_summary)
    loud = [name for name, look in looks.items() if not look.quiet]
    assert loud == ["pre", "post", "siamese", "p0", "p1", "p3", "p5", "p6"]
    assert len({looks[name].colour for name in loud}) == len({looks[name].marker for name in loud}) == 8
    assert {looks[name].colour for name in ("p8", "p9")} == {GREY}


def test_up_to_eight_none_is_quiet_and_no_colour_repeats(made_up_summary):
    for names in ("abcdefgh", ("pre", "post", "siamese", "siamese_hybrid_pre", *"abcd")):
        summary = made_up_summary({(name, 0.01): [2.0] for name in names})
        looks = chosen_looks(summary)
        assert not has_many(summary)
        assert not any(look.quiet for look in looks.values())
        assert len({look.colour for look in looks.values()}) == 8
