"""Each family's configuration is the same function as its implementation in transformers, on the same random weights.

Equal are the logits and the gradient of every parameter. Where each of our parameters is in theirs say the role tables
that ``normstream convert`` uses; here are only numbers, a tiny configuration on either side. With four layers or more
and sequences longer than the window, every pattern of layers occurs.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normstream.checkpoints.conversion.convert import read_tensors_of, write_tensors_of
from normstream.checkpoints.conversion.formats.family import Family
from normstream.checkpoints.conversion.formats.hf import HF
from normstream.checkpoints.conversion.settings import decoder_settings, differences
from normstream.checkpoints.save import file_tensors
from normstream.models import DecoderConfig, DecoderLM, LatentConfig
from normstream.models.families import FAMILIES, family

DIM, HEADS, KV_HEADS, FFN, TOKENS = 32, 4, 2, 48, 13


@dataclass(frozen=True)
class Tiny:
    """A tiny model on either side."""

    their_config: str
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    n_layers: int = 4


GROUPED = {"n_kv_heads": KV_HEADS}
THEIR_GROUPED = {"num_key_value_heads": KV_HEADS}
WIDE_HEADS = GROUPED | {"head_dim": 12}
THEIR_WIDE_HEADS = THEIR_GROUPED | {"head_dim": 12}
WINDOW = {"window": 5}
THEIR_WINDOW = {"sliding_window": 5}

TINY = {
    "llama": Tiny("LlamaConfig", GROUPED, THEIR_GROUPED),
    "qwen3": Tiny("Qwen3Config", WIDE_HEADS, THEIR_WIDE_HEADS),
    "deepseek_v3": Tiny(
        "DeepseekV3Config",
        {"latent": LatentConfig(kv_rank=12, q_rank=20, nope_head_dim=6, rope_head_dim=4, v_head_dim=10)},
        {
            "kv_lora_rank": 12,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "num_key_value_heads": HEADS,
            "first_k_dense_replace": 4,
        },
    ),
    "olmo": Tiny("OlmoConfig", GROUPED, THEIR_GROUPED),
    "gpt2": Tiny("GPT2Config", {}, {"n_inner": FFN, "n_positions": 16}),
    "gemma2": Tiny(
        "Gemma2Config",
        WIDE_HEADS | WINDOW | {"query_scale": 10**-0.5, "attention_cap": 2.0, "logit_cap": 3.0},
        THEIR_WIDE_HEADS
        | THEIR_WINDOW
        | {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Tiny(
        "Gemma3TextConfig",
        WIDE_HEADS | WINDOW | {"query_scale": 10**-0.5},
        THEIR_WIDE_HEADS | THEIR_WINDOW | {"query_pre_attn_scalar": 10},
        n_layers=7,
    ),
    "olmo2": Tiny("Olmo2Config", GROUPED, THEIR_GROUPED),
    "glm4": Tiny("Glm4Config", WIDE_HEADS, THEIR_WIDE_HEADS),
    "cohere2": Tiny("Cohere2Config", GROUPED | WINDOW, THEIR_GROUPED | THEIR_WINDOW, n_layers=5),
    "gpt_neox": Tiny("GPTNeoXConfig", {"dim": 64}, {"hidden_size": 64}),  # two pairs in a head turn
    "bloom": Tiny("BloomConfig", {"ffn_dim": 4 * DIM}),
    "phi": Tiny("PhiConfig", GROUPED, THEIR_GROUPED),
}


def our_config(name: str) -> DecoderConfig:
    tiny = TINY[name]
    sizes = {"vocab_size": 40, "dim": DIM, "n_heads": HEADS, "ffn_dim": FFN, "max_seq_len": 16}
    return family(name, **(sizes | {"n_layers": tiny.n_layers} | tiny.ours))


def their_config(name: str) -> Any:
    import transformers  # takes seconds, hence only in the tests that need it

    tiny = TINY[name]
    sizes = {"vocab_size": 40, "hidden_size": DIM, "num_attention_heads": HEADS, "num_hidden_layers": tiny.n_layers}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return getattr(transformers, tiny.their_config)(**(sizes | ids | {"intermediate_size": FFN} | tiny.theirs))


class InDouble(TorchFunctionMode):
    """Every float32 that code names becomes float64: dtype arguments, ``.float()``, and so all tables and softmaxes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def up(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        return func(*map(up, args), **{key: up(value) for key, value in (kwargs or {}).items()})


def their_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Their model with random weights, gains and biases, the same in either dtype."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(their_config(name), dtype=dtype, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
            else:  # a gain or a bias: somewhere around its initial value
                parameter.add_(0.3 * values)
    return model


def their_family(name: str) -> Family:
    return HF["gemma3_text" if name == "gemma3" else name]


def in_our_names(name: str, theirs: nn.Module) -> dict[str, Tensor]:
    """Their tensors, by the names and in the layouts of their files, as ours."""
    one, settings = their_family(name), decoder_settings(our_config(name))
    stored = read_tensors_of("hf", one, settings, file_tensors(theirs), one.gain)
    return write_tensors_of("normstream", stored)


def our_model(name: str, theirs: nn.Module, dtype: torch.dtype) -> DecoderLM:
    model = DecoderLM(our_config(name)).to(dtype).eval()
    ours, tensors = dict(model.named_parameters()), in_our_names(name, theirs)
    assert sorted(ours) == sorted(tensors)
    with torch.no_grad():
        for key, tensor in tensors.items():
            assert tensor.shape == ours[key].shape, key
            ours[key].copy_(tensor)
    return model


@pytest.fixture(params=TINY)
def name(request) -> str:
    return request.param


def test_their_configuration_is_ours(name):
    """The conversion reads from their configuration what is written above for ours, and writes it back."""
    one, settings = their_family(name), decoder_settings(our_config(name))
    config = their_config(name).to_dict()
    assert differences(one.settings(config), settings) == []
    assert differences(one.settings({**config, **one.config(settings)}), settings) == []


def pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, DecoderLM]:
    """Their model and ours with its weights."""
    if dtype == torch.float32:
        theirs = their_model(name, dtype)
    else:
        with InDouble():
            theirs = their_model(name, dtype)
        if name == "bloom":  # writes sqrt(2 / pi) in its GELU with eight digits, enough for float32 only
            for block in theirs.get_submodule("transformer.h").children():
                block.get_submodule("mlp").gelu_impl = nn.GELU("tanh")
    return theirs, our_model(name, theirs, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_logits(name, dtype, tolerance):
    theirs, ours = pair(name, dtype)
    tokens = torch.randint(40, (2, TOKENS))
    with torch.no_grad(), InDouble() if dtype == torch.float64 else nullcontext():
        wanted = theirs(tokens).logits
    with torch.no_grad():
        logits = ours(tokens)
    assert wanted.dtype == logits.dtype == dtype
    assert wanted.std() > 0.05
    assert (logits - wanted).abs().max().item() <= tolerance


def test_gradients(name):
    theirs, ours = pair(name, torch.float64)
    tokens, weight = torch.randint(40, (2, TOKENS)), torch.randn(2, TOKENS, 40, dtype=torch.float64)
    with InDouble():
        (weight * theirs(tokens).logits).sum().backward()
    (weight * ours(tokens)).sum().backward()
    wanted = in_our_names(name, with_gradients_as_weights(theirs))
    for key, parameter in ours.named_parameters():
        error = (gradient(parameter) - wanted[key]).abs().max().item()
        largest = max(wanted[key].abs().max().item(), 1e-3)  # that of a key's bias is zero: softmax does not see it
        assert error <= 1e-9 * largest, key


def with_gradients_as_weights(model: nn.Module) -> nn.Module:
    """A copy whose weights are the gradients: so they get the names and layouts that files have."""
    twin = copy.deepcopy(model)
    for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.data = gradient(original)
    return twin


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_every_family_is_compared():
    assert set(TINY) == set(FAMILIES)
