"""The global order: a permutation per epoch, the same for every number of ranks, from any step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normstream.data import Loader, PackedTokens
from normstream.data.loader import epoch_order


def loader_of(n_samples: int, batch_size: int, seed: int = 0) -> Loader:
    tokens = np.arange(n_samples * 4 + 1)
    return Loader(PackedTokens(tokens, seq_len=4, eot=-1, n_bytes=0), batch_size, seed)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_every_epoch_sees_every_sample_once(n_samples: int, batch_size: int, seed: int) -> None:
    loader = loader_of(n_samples, batch_size, seed)
    steps = -(-3 * n_samples // batch_size)
    order = np.concatenate([loader.samples(step) for step in range(steps)])
    for epoch in range(3):
        assert sorted(order[epoch * n_samples : (epoch + 1) * n_samples]) == list(range(n_samples))


@given(st.integers(1, 40), st.integers(0, 30), st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]))
def test_the_order_does_not_depend_on_the_world_size(n_samples: int, step: int, world: tuple[int, int]) -> None:
    world_size, batch_size = world
    whole = loader_of(n_samples, 8).samples(step)
    ranks = [loader_of(n_samples, batch_size).samples(step, rank, world_size) for rank in range(world_size)]
    assert np.concatenate(ranks).tolist() == whole.tolist()


def test_batches_of_four_ranks_make_up_the_batch_of_one() -> None:
    for step in (0, 3, 17):
        whole = loader_of(50, 8).batch(step)
        ranks = [loader_of(50, 2).batch(step, rank, 4) for rank in range(4)]
        assert torch.equal(torch.cat([batch.inputs_BT for batch in ranks]), whole.inputs_BT)
        assert torch.equal(torch.cat([batch.targets_BT for batch in ranks]), whole.targets_BT)


def test_any_step_can_be_asked_for_first() -> None:
    walked = loader_of(23, 5)
    in_order = [walked.samples(step).tolist() for step in range(20)]
    assert [loader_of(23, 5).samples(step).tolist() for step in (19, 4, 11)] == [in_order[i] for i in (19, 4, 11)]


def test_a_batch_larger_than_the_corpus_runs_through_several_epochs() -> None:
    samples = loader_of(3, 10).samples(0)
    assert [sorted(samples[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_batch_holds_the_samples_it_names() -> None:
    loader = loader_of(20, 4)
    # sample i of the tokens 0, 1, 2 ... is 4i, 4i + 1, 4i + 2, 4i + 3
    assert loader.batch(2).inputs_BT[:, 0].tolist() == [4 * i for i in loader.samples(2)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_order(1000, seed, epoch) for seed in range(3) for epoch in range(3)]
    agreement = [(a == b).mean() for i, a in enumerate(orders) for b in orders[:i]]
    assert max(agreement) < 0.02  # independent permutations agree in one place on average
    assert abs(np.corrcoef(orders[0], np.arange(1000))[0, 1]) < 0.15  # 4.7 standard deviations


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        loader_of(4, 0)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        loader_of(4, 1, seed=-1)
    with pytest.raises(ValueError, match="no sample to load: the data, of size 1"):
        loader_of(0, 1)
    for step, rank, world_size in ((-1, 0, 1), (0, 2, 2), (0, -1, 2)):
        with pytest.raises(ValueError, match="0 <= rank < world_size"):
            loader_of(4, 1).batch(step, rank, world_size)
