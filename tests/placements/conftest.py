"""Driving a placement without a model: a row of junctions with any functions as sublayers."""

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from normstream.junctions import Junction, State

Sublayer = Callable[[Tensor], Tensor]


@pytest.fixture(scope="session")
def run_row() -> Callable[[Sequence[Junction], Tensor, Sequence[Sublayer]], tuple[list[State], list[Tensor]]]:
    """A function of (row, embedding, sublayers) that gives the state and z after each junction."""

    def run(
        row: Sequence[Junction], embedding: Tensor, sublayers: Sequence[Sublayer]
    ) -> tuple[list[State], list[Tensor]]:
        state, z = row[0]((), embedding)
        states, inputs = [state], [z]
        for junction, sublayer in zip(row[1:], sublayers, strict=True):
            state, z = junction(state, sublayer(z))
            states.append(state)
            inputs.append(z)
        return states, inputs

    return run
