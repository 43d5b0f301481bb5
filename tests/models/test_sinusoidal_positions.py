"""Sinusoidal positions of a decoder: those of a learned table that holds the paper's numbers."""

import math
from dataclasses import replace

import pytest
import torch

from normstream.init import initialize
from normstream.layers import KVCache, PositionConfig
from normstream.models import DecoderConfig, DecoderLM

CONFIG = DecoderConfig(
    placement="pre",
    vocab_size=11,
    dim=8,
    n_layers=1,
    n_heads=2,
    max_seq_len=12,
    positions=PositionConfig(kind="sinusoidal", theta=100.0),
)


def test_a_decoder_with_and_without_a_cache():
    model, learned = DecoderLM(CONFIG), DecoderLM(replace(CONFIG, positions=PositionConfig(kind="learned")))
    initialize(model, seed=0)
    assert learned.pos_embeddings is not None
    learned.load_state_dict(model.state_dict() | {"pos_embeddings.weight": learned.pos_embeddings.weight})
    with torch.no_grad():
        for position in range(12):
            for pair in range(4):
                angle = position / 100 ** (pair / 4)
                learned.pos_embeddings.weight[position, 2 * pair] = math.sin(angle)
                learned.pos_embeddings.weight[position, 2 * pair + 1] = math.cos(angle)
        tokens, cache = torch.randint(11, (2, 12)), KVCache()
        wanted = learned(tokens)
        torch.testing.assert_close(model(tokens), wanted)
        parts = [model(part, cache=cache) for part in tokens.split(5, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), wanted)


def test_an_odd_width_has_no_pairs():
    with pytest.raises(ValueError, match="sinusoidal positions need an even dim, got 7"):
        replace(CONFIG, dim=7, n_heads=1)
