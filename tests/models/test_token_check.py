"""Token ids outside the vocabulary are named by every model of tokens; compiled models are not slowed down."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from normstream.models import DecoderConfig, DecoderLM, Encoder, EncoderConfig, EncoderDecoder, EncoderDecoderConfig
from normstream.models import decoder as module
from normstream.models.ids import check_ids

SIZES: dict[str, Any] = {"vocab_size": 11, "dim": 8, "n_layers": 1, "n_heads": 2}


@pytest.mark.parametrize("wrong", [-1, 11, 2**40])
def test_every_model_names_the_token(wrong: int):
    tokens, fine = torch.tensor([[0, 10, wrong]]), torch.zeros(1, 3, dtype=torch.int64)
    message = f"token ids must be at least 0 and below vocab_size 11, got {wrong}"
    calls = [
        lambda: DecoderLM(DecoderConfig(**SIZES))(tokens),
        lambda: Encoder(EncoderConfig(**SIZES))(tokens),
        lambda: EncoderDecoder(EncoderDecoderConfig(**SIZES))(tokens, fine),
        lambda: EncoderDecoder(EncoderDecoderConfig(**SIZES))(fine, tokens),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_the_lowest_and_the_highest_token_are_fine():
    check_ids("token ids", torch.tensor([[0, 10]]), 11, "vocab_size")
    check_ids("token ids", torch.zeros(1, 0, dtype=torch.int64), 11, "vocab_size")


COMPILED = """
import torch
from normstream import DecoderConfig, DecoderLM
model = DecoderLM(DecoderConfig(placement="pre", vocab_size=11, dim=8, n_layers=1, n_heads=2)).eval()
tokens = torch.tensor([[1, 2, 3]])
torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(tokens), model(tokens))
"""


def test_a_compiled_model_has_no_break_for_it():
    """With fullgraph, reading a number from a tensor is an error. In a process without the tests' checks of types."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


def test_once_a_forward_pass(monkeypatch: pytest.MonkeyPatch):
    """It looks at every token, so not once a layer."""
    asked = []
    monkeypatch.setattr(module, "check_ids", lambda *arguments: asked.append(arguments))
    DecoderLM(replace(DecoderConfig(**SIZES), n_layers=5))(torch.tensor([[1]]))
    assert len(asked) == 1
