import numpy as np

from normstream.lab.panels import DEPTH, Line, Lines, common_limits
from normstream.lab.plots import loss_limits, pictures, ratios
from normstream.lab.style import COLOURS, GREY, SPARE_COLOURS, looks


def one_line(*values: float) -> Lines:
    look = looks(["pre"])["pre"]
    return {(0.01, ""): [Line(look, (dict(enumerate(values)),))]}


def test_a_placement_has_one_colour_whatever_it_is_compared_with():
    alone, together = looks(["siamese"]), looks(["other", "post", "siamese", "siamese(depth_scale=paper)"])
    assert alone["siamese"] == together["siamese"]
    assert len({look.colour for look in together.values()}) == 4


def test_colours_stand_out_on_white():
    """Contrast of at least 3:1 with white, as WCAG 2.1 asks of graphics."""

    def linear(channel: int) -> float:
        c = channel / 255
        return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4

    for colour in (*COLOURS.values(), *SPARE_COLOURS, GREY):
        red, green, blue = (linear(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 3.0, colour


def test_mean_and_band_over_the_seeds_that_have_a_value():
    line = Line(looks(["pre"])["pre"], ({1: 2.0, 2: 4.0}, {1: 4.0}))
    assert line.over_seeds(max) == {1: 4.0, 2: 4.0}
    assert line.over_seeds(min) == {1: 2.0, 2: 4.0}


def test_a_tiny_value_does_not_flatten_the_others():
    low, high = common_limits(one_line(1.0, 0.1, 1e-20), log=True)
    assert 0.1 / DEPTH < low < 1 / DEPTH < 1 < high


def test_limits_hold_everything_else():
    for values in ((2.0, 3.0), (2.0, 2.0), (0.0, 0.0)):
        low, high = common_limits(one_line(*values), log=False)
        assert low < min(values) <= max(values) < high
    low, high = common_limits(one_line(0.0, 0.0), log=True)
    assert 0 < low < high


def test_loss_limits_show_the_ends_and_not_a_diverged_run(made_up_summary):
    runs = made_up_summary({("pre", 0.1): [2.0], ("post", 0.1): [40.0]})["runs"]
    runs[1]["diverged"] = True
    low, high = loss_limits(runs, baseline_loss=3.0)
    assert low < 2.0 < 3.0 < high < 4.0


def test_learning_rates_as_far_apart_as_a_comparison_takes(made_up_summary):
    summary = made_up_summary({("pre", 1e-30): [3.0], ("siamese", 1e-30): [3.0], ("pre", 1e30): [None]})
    drawn = {picture.name: picture.panels for picture in pictures(summary)}
    svg = drawn["loss-by-rate"][0].svg
    assert ">1e-30<" in svg
    assert ">1e30<" in svg


def test_ratio_of_the_streams_layer_by_layer():
    assert ratios([1.0, 3.0, None, 1.0], [2.0, 1.5, 1.0, 0.0]) == {0: 0.5, 1: 2.0}


def test_the_picture_by_layer_says_when_it_is_cut(summary):
    def explanation() -> str:
        return next(picture.explanation for picture in pictures(summary) if picture.name == "gradient-by-layer")

    assert "goes on below" not in explanation()
    summary["runs"][0]["layers"]["grad_norm"][0] = 1e-12
    assert "1e-6 times its largest value" in explanation()


def test_of_many_placements_eight_are_in_the_legend(many_summary):
    for picture in pictures(many_summary):
        quiet = [key for key in picture.keys if key.colour == GREY]
        assert [key.label for key in quiet] in (["2 others"], [])
        placements = {key.label.partition(",")[0] for key in picture.keys} - {"2 others"}
        assert len(placements) == (1 if picture.name == "stream-ratio" else 8)


def test_one_rate_of_many_placements_needs_no_picture_by_rate(made_up_summary):
    names = {picture.name for picture in pictures(made_up_summary({(f"p{i}", 0.01): [2.0] for i in range(9)}))}
    assert "loss-by-rate" not in names
    assert "validation-loss" in names


def test_spare_colours_differ_for_colour_blind_readers_too():
    """Distance in OKLab (Ottosson 2020) as seen with normal vision, protanopia and deuteranopia (Machado 2009)."""
    protanopia = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    deuteranopia = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    to_lms = [[0.412221, 0.536333, 0.051446], [0.211903, 0.680700, 0.107397], [0.088302, 0.281719, 0.629979]]
    to_lab = [[0.210454, 0.793618, -0.004072], [1.977998, -2.428592, 0.450594], [0.025904, 0.782772, -0.808676]]
    names = [*COLOURS.values(), *SPARE_COLOURS]
    channels = np.array([[int(name[i : i + 2], 16) / 255 for i in (1, 3, 5)] for name in names])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    for vision in (np.eye(3), protanopia, deuteranopia):
        seen = np.clip(linear @ np.array(vision).T, 0, 1)
        lab = np.cbrt(seen @ np.array(to_lms).T) @ np.array(to_lab).T
        distances = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
        for i in range(len(COLOURS), len(names)):
            assert np.delete(distances[i], i).min() > 0.08, names[i]
