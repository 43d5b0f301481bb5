"""Settings that hold for every test: one thread, no network, the same examples in every run."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported, hence above every other import
os.environ["MPLBACKEND"] = "Agg"

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from hypothesis import settings

settings.register_profile("normstream", deadline=None, derandomize=True)
settings.load_profile("normstream")

torch.set_num_threads(1)  # two workers share two cores, and sums do not depend on the number of threads


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it in the same worker."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _types_unchecked_if_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test marked `untyped` reach our own errors, which jaxtyping's would come before."""
    jaxtyping.config.update("jaxtyping_disable", "untyped" in request.keywords)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
