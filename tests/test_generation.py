"""Generation: the cache changes no logit, greedy and sampled choices, errors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normstream.generation import generate
from normstream.init import initialize
from normstream.layers import KVCache
from normstream.models import DecoderConfig, DecoderLM

PLACEMENTS = ["pre", "post", "siamese", "siamese_hybrid_pre"]
CONFIG = DecoderConfig(
    placement="pre", vocab_size=23, dim=24, n_layers=3, n_heads=4, n_kv_heads=2, max_seq_len=24, init_std=0.3
)


def build(placement: str, **options) -> DecoderLM:
    model = DecoderLM(replace(CONFIG, placement=placement, **options))
    initialize(model, seed=0)
    return model.double().eval()


def prompt(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(0, 23, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("chunks", [[1] * 16, [16], [5, 3, 1, 1, 6], [15, 1]])
def test_cached_logits_equal_the_full_forward(placement, chunks):
    model, tokens, cache = build(placement), prompt(), KVCache()
    with torch.no_grad():
        full = model(tokens)
        parts = [model(chunk, cache=cache) for chunk in tokens.split(chunks, dim=1)]
    assert cache.length == 16
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-10)


def test_the_cache_counts_towards_the_longest_sequence():
    model, cache = build("pre"), KVCache()
    with torch.no_grad():
        model(prompt(length=16), cache=cache)
        model(prompt(length=8), cache=cache)
        with pytest.raises(ValueError, match="24"):
            model(prompt(length=1), cache=cache)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_greedy_is_the_argmax_of_the_full_forward(placement):
    model, tokens = build(placement), prompt(length=4)
    got = generate(model, tokens, 12, temperature=0.0)
    expected = tokens
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(got, expected)


def test_sampling_depends_on_its_seed_alone():
    model, tokens = build("siamese"), prompt(batch=4, length=3)
    torch.manual_seed(0)
    one = generate(model, tokens, 12, temperature=1.0, seed=1)
    torch.manual_seed(1)
    assert torch.equal(one, generate(model, tokens, 12, temperature=1.0, seed=1))
    assert not torch.equal(one, generate(model, tokens, 12, temperature=1.0, seed=2))
    assert one.min() >= 0
    assert one.max() < 23


def test_the_likeliest_of_one_is_greedy():
    model, tokens = build("pre"), prompt(length=3)
    assert torch.equal(generate(model, tokens, 8, temperature=1.5, top_k=1), generate(model, tokens, 8))


def test_top_k_keeps_to_the_k_likeliest():
    model, tokens = build("pre"), prompt(batch=1, length=3).expand(400, -1)
    with torch.no_grad():
        probabilities = torch.softmax(model(tokens[:1])[0, -1] / 2.0, -1)
    likeliest = probabilities.topk(3)
    drawn = generate(model, tokens, 1, temperature=2.0, top_k=3)[:, -1]
    assert set(drawn.tolist()) <= set(likeliest.indices.tolist())
    shares = torch.stack([(drawn == i).double().mean() for i in likeliest.indices])
    torch.testing.assert_close(shares, likeliest.values / likeliest.values.sum(), rtol=0, atol=0.1)


def test_end_of_text_stops_a_row():
    model, tokens = build("pre"), prompt(batch=1, length=4)
    free = generate(model, tokens, 12)[0, 4:].tolist()
    eot = free[3]
    stopped = generate(model, tokens, 12, eot=eot)[0, 4:].tolist()
    assert stopped == free[: free.index(eot) + 1]


def test_a_finished_row_repeats_end_of_text_until_the_others_end():
    model, tokens = build("siamese"), prompt(batch=4, length=4)
    free = generate(model, tokens, 12)
    eot = int(free[0, 5])
    got = generate(model, tokens, 12, eot=eot)
    for ours, plain in zip(got[:, 4:].tolist(), free[:, 4:].tolist(), strict=True):
        end = plain.index(eot) + 1 if eot in plain else len(plain)
        assert ours[:end] == plain[: min(end, len(ours))]
        assert all(token == eot for token in ours[end:])


def test_nothing_to_generate():
    assert torch.equal(generate(build("pre"), prompt(), 0), prompt())


def test_training_mode_is_restored_and_dropout_is_off():
    model, tokens = build("pre", dropout=0.5).train(), prompt(length=4)
    got = generate(model, tokens, 6)
    assert model.training
    assert torch.equal(got, generate(model.eval(), tokens, 6))
    assert not model.training


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": 9}, ["24"]),
        ({"max_new_tokens": -1}, ["max_new_tokens", "-1"]),
        ({"max_new_tokens": 1, "temperature": -1.0}, ["temperature", "-1"]),
        ({"max_new_tokens": 1, "temperature": 1.0, "top_k": 0}, ["top_k", "0"]),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=r".+") as error:
        generate(build("pre"), prompt(length=16), **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_empty_prompt():
    with pytest.raises(ValueError, match="prompt"):
        generate(build("pre"), torch.zeros(1, 0, dtype=torch.int64), 1)
