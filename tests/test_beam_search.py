"""Beam search: against brute force, against a plain beam search without a cache, against greedy decoding; errors."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import normstream
from normstream.beam_search import beam_search, greedy_search
from normstream.models import EncoderDecoder, EncoderDecoderConfig

BOS, EOS = 0, 1
CONFIG = EncoderDecoderConfig(
    placement="pre", vocab_size=12, dim=16, n_layers=1, n_heads=2, ffn_dim=24, max_seq_len=12, init_std=0.5
)


def build(seed: int = 0, **changes) -> EncoderDecoder:
    """A model that prefers some tokens and ends now and then, as a trained one does."""
    model = EncoderDecoder(replace(CONFIG, **changes))
    normstream.initialize(model, seed=seed)
    model = model.double()
    with torch.no_grad():
        model.lm_head.weight *= 2
    return model


def sources(n: int = 4, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(2, 12, (n, length), generator=torch.Generator().manual_seed(seed))


def padding_of(source: Tensor, lengths: list[int]) -> Tensor:
    return torch.arange(source.shape[1]) >= torch.tensor(lengths)[:, None]


def penalty(n: int, exponent: float) -> float:
    return ((5 + n) / 6) ** exponent


@torch.no_grad()
def log_p(model: EncoderDecoder, source: Tensor, target: list[int]) -> float:
    """The log-probability of a whole target, by one full forward pass."""
    inputs = torch.tensor([[BOS, *target[:-1]]])
    logits = model.eval()(source[None], inputs)[0]
    return logits.log_softmax(-1)[range(len(target)), target].sum().item()


def stripped(row: Tensor) -> list[int]:
    """A row up to its first end of sequence, which is kept."""
    tokens = row.tolist()
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


@pytest.mark.parametrize("exponent", [0.0, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_that_holds_everything_finds_the_best_of_all_targets(seed, exponent):
    """Only 4 of 64 tokens are possible, so that no more than 4 + 12 + 36 + 108 continuations ever compete at a step."""
    model = build(seed, vocab_size=128, head_bias=True)
    with torch.no_grad():
        model.lm_head.bias.fill_(-1e4)
        model.lm_head.bias[:4] = 0
    source = sources(1, seed=seed)[0]
    words = [token for token in range(4) if token != EOS]
    targets = [[*body, EOS] for n in range(4) for body in itertools.product(words, repeat=n)]
    scores = [log_p(model, source, target) / penalty(len(target), exponent) for target in targets]
    found = beam_search(model, source[None], bos=BOS, eos=EOS, max_new_tokens=4, beam_size=128, length_penalty=exponent)
    assert stripped(found[0]) == targets[max(range(len(targets)), key=scores.__getitem__)]


def plain_beam_search(model: EncoderDecoder, source: Tensor, beam_size: int, exponent: float, n_max: int) -> list[int]:
    """One row, lists, no cache, no early end: the K likeliest continuations; finished ones leave."""
    live, done = [([], 0.0)], []
    for n in range(1, n_max + 1):
        step = [(tokens, model.eval()(source[None], torch.tensor([[BOS, *tokens]]))[0, -1]) for tokens, _ in live]
        continued = [
            ([*tokens, token], score + value)
            for (tokens, logits), (_, score) in zip(step, live, strict=True)
            for token, value in enumerate(logits.log_softmax(-1).tolist())
        ]
        kept = sorted(continued, key=lambda pair: -pair[1])[:beam_size]
        done += [(tokens, score / penalty(n, exponent)) for tokens, score in kept if tokens[-1] == EOS]
        live = [(tokens, score) for tokens, score in kept if tokens[-1] != EOS]
    return max(done or live, key=lambda pair: pair[1])[0]


@pytest.mark.parametrize("exponent", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_against_a_plain_beam_search(beam_size, exponent):
    model, source = build(3), sources(6)
    with torch.no_grad():
        wanted = [plain_beam_search(model, row, beam_size, exponent, n_max=8) for row in source]
    found = beam_search(model, source, bos=BOS, eos=EOS, max_new_tokens=8, beam_size=beam_size, length_penalty=exponent)
    assert [stripped(row) for row in found] == wanted
    assert found.shape[1] == max(map(len, wanted))
    assert len({len(row) for row in wanted}) > 1, "rows should end at different lengths"


def test_wider_beams_and_penalties_change_something():
    """The two tests above would say nothing if every beam found the same."""
    model, source = build(3), sources(6)

    def found(**options) -> list[list[int]]:
        return [stripped(row) for row in beam_search(model, source, bos=BOS, eos=EOS, max_new_tokens=8, **options)]

    assert found(beam_size=1) != found(beam_size=4)
    assert found(length_penalty=0.0) != found(length_penalty=2.0)


@pytest.mark.parametrize("placement", ["post", "siamese", "realformer", "siamese_depth_attention", "ngpt"])
def test_greedy_is_the_argmax_of_full_forward_passes_and_a_beam_of_one(placement):
    model, source = build(5, placement=placement), sources(5)
    padding = padding_of(source, [6, 3, 4, 1, 6])
    target = torch.full((5, 1), BOS)
    with torch.no_grad():
        for _ in range(8):
            target = torch.cat((target, model.eval()(source, target, padding)[:, -1:].argmax(-1)), dim=1)
    options: dict[str, Any] = {"bos": BOS, "eos": EOS, "max_new_tokens": 8}
    greedy = greedy_search(model, source, padding, **options)
    assert [stripped(row) for row in greedy] == [stripped(row) for row in target[:, 1:]]
    assert all(set(row.tolist()[len(stripped(row)) :]) <= {EOS} for row in greedy)
    assert torch.equal(beam_search(model, source, padding, **options, beam_size=1), greedy)


def test_rows_and_their_padding_do_not_meddle_with_each_other():
    model, lengths = build(3), [6, 2, 4, 5]
    source = sources(4)
    options: dict[str, Any] = {"bos": BOS, "eos": EOS, "max_new_tokens": 8}
    together = beam_search(model, source, padding_of(source, lengths), **options)
    for row, tokens, length in zip(together, source, lengths, strict=True):
        alone = beam_search(model, tokens[None, :length], **options)
        assert stripped(row) == stripped(alone[0])
    assert torch.equal(together, beam_search(model, source, padding_of(source, lengths), **options))


@pytest.mark.parametrize(("exponent", "length"), [(0.7, 1), (0.84, 1), (0.86, 2), (0.88, 4), (0.9, 6), (0.92, 8)])
def test_the_length_that_gnmt_s_penalty_favours(exponent, length):
    """At each step the end has probability 0.2, another token 0.8: log P of n tokens is (n - 1) log 0.8 + log 0.2."""
    model = build(0, head_bias=True)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(-1e4)
        model.lm_head.bias[EOS], model.lm_head.bias[2] = math.log(0.2), math.log(0.8)
    options: dict[str, Any] = {"bos": BOS, "eos": EOS, "max_new_tokens": 8, "beam_size": 2}
    scores = [((n - 1) * math.log(0.8) + math.log(0.2)) / penalty(n, exponent) for n in range(1, 9)]
    assert 1 + scores.index(max(scores)) == length
    found = beam_search(model, sources(1), length_penalty=exponent, **options)
    assert found[0].tolist() == [2] * (length - 1) + [EOS]


def test_the_search_ends_when_nothing_can_win(monkeypatch):
    """The end is all but certain at once, and no live beam can catch up with it."""
    model, calls = build(0, head_bias=True), []
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()
        model.lm_head.bias[EOS] = 9.0
    monkeypatch.setattr(model, "decode", lambda *args: calls.append(1) or EncoderDecoder.decode(model, *args))
    found = beam_search(model, sources(2), bos=BOS, eos=EOS, max_new_tokens=12)
    assert found.tolist() == [[EOS], [EOS]]
    assert len(calls) == 1


def test_without_an_end_the_likeliest_beam_comes_as_it_is_and_the_mode_stays():
    model = build(0, head_bias=True).train()
    with torch.no_grad():
        model.lm_head.bias[EOS] = -math.inf
    found = beam_search(model, sources(2), bos=BOS, eos=EOS, max_new_tokens=5)
    assert found.shape == (2, 5)
    assert EOS not in found
    assert model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1 and at most vocab_size 12, got 0"),
        ({"beam_size": 13}, "got 13"),
        ({"length_penalty": -0.1}, "length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 13}, "at most max_seq_len 12, got 13"),
        ({"bos": 12}, "bos must be a token id below vocab_size 12, got 12"),
        ({"eos": -1}, "eos"),
    ],
)
def test_errors(options: dict[str, Any], message):
    options = {"bos": BOS, "eos": EOS, "max_new_tokens": 4} | options
    with pytest.raises(ValueError, match=message):
        beam_search(build(), sources(1), **options)


def test_no_source_is_an_error():
    with pytest.raises(ValueError, match="no source"):
        greedy_search(build(), sources(1)[:0], bos=BOS, eos=EOS, max_new_tokens=4)
