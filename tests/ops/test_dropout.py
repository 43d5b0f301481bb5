"""Dropout in front of the fused operation: drawn once, for all streams, as the plain code draws it."""

from typing import Any

import pytest
import torch
from row_program import Case, case_of, derive, errors, given, incoming_of, plain_of, run_counted
from torch import Tensor

from normstream import placements
from normstream.junctions import Drop, Junction, SiameseJoin


@pytest.mark.parametrize("rates", [{"dropout": 0.4}, {"drop_path": 0.5}], ids=str)
@pytest.mark.parametrize("spec", ["pre", "post", "residual(scale=0.3)", "siamese"])
def test_one_draw_for_both_streams(spec: str, rates: dict[str, Any]) -> None:
    """With the same seed the fused operation and the plain code drop the same entries."""
    row = placements.get(spec).junctions(16, n_layers=2, **rates)
    case = given(spec, row[3].train(), len(placements.get(spec).streams), (8, 3, 16))
    incoming = incoming_of(case)
    (fused, n), (plain, none) = (run_seeded(one, incoming) for one in (case, plain_of(case)))
    assert (n, none) == (1, 0)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    case.junction.eval()
    (whole, _), n = run_seeded(case, incoming)
    assert n == 1
    assert not torch.allclose(whole[0], fused[0][0], atol=0.1)


def run_seeded(case: Case, incoming: list[Tensor]) -> tuple[Any, int]:
    torch.manual_seed(1)
    return run_counted(lambda: derive(case, incoming))


def test_what_is_dropped_is_dropped_from_both_streams() -> None:
    case = case_of("siamese_hybrid_pre", 2, (4, 5, 16))
    join = SiameseJoin(None, 0.5, Drop(0.5).train())
    junction = Junction(join, case.junction.read)
    ((x, y), _), n = run_counted(lambda: junction(case.state, case.update))
    assert n == 1
    kept_x, kept_y = x - case.state[0], y - case.state[1]
    torch.testing.assert_close(2 * kept_x, kept_y)
    dropped = kept_y.abs() < 1e-6
    assert 0.3 < dropped.float().mean() < 0.7
    torch.testing.assert_close(kept_y[~dropped], 2 * case.update[~dropped], rtol=1e-4, atol=1e-5)


def test_dropout_after_an_output_norm() -> None:
    """It comes after the norm, where the fused operation has none: the plain code runs, in evaluation the fused one."""
    row = placements.get("peri").junctions(16, n_layers=2, dropout=0.3)
    case = given("peri", row[1].train(), 1, (4, 5, 16))
    incoming = incoming_of(case)
    (fused, n), (plain, _) = (run_seeded(one, incoming) for one in (case, plain_of(case)))
    assert n == 0
    torch.testing.assert_close(fused, plain, rtol=0, atol=0)
    case.junction.eval()
    assert max(errors(case, incoming)[0]) <= 2e-6
