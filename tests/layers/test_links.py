"""Links between the attention layers of one forward pass: scores (RealFormer) and values (depth attention)."""

import math

import pytest
import torch
from torch import Tensor

from normstream.layers import Attention, Context
from normstream.layers.links import Links, mix_values


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n_sources", [0, 1, 3])
def test_values_over_depth_by_hand(n_sources):
    """At each position: softmax over the layers' keys, self last, for the mean of a group's queries."""
    q, k, v = random(2, 4, 5, 6, seed=0), random(2, 2, 5, 6, seed=1), random(2, 2, 5, 6, seed=2)
    sources = [(random(2, 2, 5, 6, seed=10 + i), random(2, 2, 5, 6, seed=20 + i)) for i in range(n_sources)]
    got = mix_values(q, k, v, sources)
    for b in range(2):
        for g in range(2):
            for t in range(5):
                query = (q[b, 2 * g, t] + q[b, 2 * g + 1, t]) / 2
                keys = [*(key[b, g, t] for key, _ in sources), k[b, g, t]]
                values = [*(value[b, g, t] for _, value in sources), v[b, g, t]]
                raw = [math.exp(float(query @ key) / math.sqrt(6)) for key in keys]
                expected = sum((w / sum(raw) * value for w, value in zip(raw, values, strict=True)), torch.zeros(6))
                torch.testing.assert_close(got[b, g, t], expected, rtol=0, atol=1e-12)


def test_every_second_layer_is_a_source_and_keeps_its_mixed_values():
    links = Links(depth_stride=2)
    q, k, v = ([random(1, 1, 3, 4, seed=10 * i + j) for i in range(4)] for j in range(3))
    got = [links.mix_depth(i, q[i], k[i], v[i]) for i in range(4)]
    assert torch.equal(got[0], v[0])
    torch.testing.assert_close(got[1], mix_values(q[1], k[1], v[1], [(k[0], v[0])]))
    torch.testing.assert_close(got[2], mix_values(q[2], k[2], v[2], [(k[0], v[0])]))
    torch.testing.assert_close(got[3], mix_values(q[3], k[3], v[3], [(k[0], v[0]), (k[2], got[2])]))


def test_a_repeated_layer_finds_what_it_found_before():
    links = Links(depth_stride=1)
    q, k, v = (random(1, 1, 3, 4, seed=j) for j in range(3))
    links.mix_depth(0, q, k, v)
    first = links.mix_depth(1, k, q, v)
    links.mix_depth(2, v, q, k)
    links.keep_scores(0, q)
    links.keep_scores(1, k)
    assert torch.equal(links.mix_depth(1, k, q, v), first)
    assert links.previous_scores(1) is q
    assert links.previous_scores(0) is None


def test_linked_scores_add_up_over_layers():
    """RealFormer: softmax(q_l k_l / sqrt(K) + all earlier such products)."""
    layers = [Attention(8, n_heads=2, n_kv_heads=2, head_dim=4, layer=i, linked_scores=True).double() for i in range(3)]
    inputs = [random(1, 5, 8, seed=i) for i in range(3)]
    context = Context(links=Links(1))
    got = [layer(z, context) for layer, z in zip(layers, inputs, strict=True)]
    total = torch.zeros(2, 5, 5, dtype=torch.float64)
    for layer, z, update in zip(layers, inputs, got, strict=True):
        q, k, v = (w(z)[0].view(5, 2, 4) for w in (layer.wq, layer.wk, layer.wv))
        total = total + torch.einsum("thk,shk->hts", q, k) / 2
        rows = [
            torch.stack([torch.softmax(total[h, t, : t + 1], 0) @ v[: t + 1, h] for h in range(2)]) for t in range(5)
        ]
        torch.testing.assert_close(update[0], layer.wo(torch.stack(rows).flatten(1)), rtol=0, atol=1e-12)
