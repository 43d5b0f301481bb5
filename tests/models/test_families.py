"""Each family's configuration is the same function as its implementation in transformers, on the same random weights.

Equal are the logits and the gradient of every parameter. Nothing but names and numbers is said here: a tiny
configuration on either side, and where each of our parameters is in theirs. With four layers or more and sequences
longer than the window, every pattern of layers occurs.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normstream.models import DecoderConfig, DecoderLM, LatentConfig
from normstream.models.families import FAMILIES, family

DIM, HEADS, KV_HEADS, FFN, TOKENS = 32, 4, 2, 48, 13

Pick = Callable[[Tensor], Tensor]
Names = dict[str, str | tuple[str, Pick]]
"""Our parameter to theirs, or to theirs and the part of it that is ours. ``{i}`` stands for every layer."""


def whole(tensor: Tensor) -> Tensor:
    return tensor


def rows(first: int, last: int) -> Pick:
    return lambda tensor: tensor[first:last]


def turned(first: int = 0, last: int | None = None) -> Pick:
    """Columns of a matrix that is stored as input by output, or entries of a vector."""
    return lambda tensor: tensor[..., first:last].T if tensor.ndim == 2 else tensor[first:last]


def of_three_in_each_head(index: int) -> Pick:
    """Queries (0), keys (1) or values (2) of a matrix whose rows are q, k, v of the first head, of the second, ..."""
    return lambda tensor: tensor.unflatten(0, (HEADS, 3, -1))[:, index].flatten(0, 1)


def linear(ours: str, theirs: str, pick: Pick = whole) -> Names:
    """Weight and bias of a linear layer or a norm."""
    return {f"{ours}.{kind}": (f"{theirs}.{kind}", pick) for kind in ("weight", "bias")}


LAYER, THEIR_LAYER = "layers.{i}", "model.layers.{i}"
ATTENTION_READ, FFN_READ = f"{LAYER}.before_attention.read.norm", f"{LAYER}.after_attention.read.norm"
ATTENTION_OUT, FFN_OUT = f"{LAYER}.after_attention.join.norm_out", f"{LAYER}.after_feed_forward.join.norm_out"

OUTSIDE: Names = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "after_layers.read.norm.weight": "model.norm.weight",
}
HEAD: Names = {"lm_head.weight": "lm_head.weight"}


def attention(block: str = LAYER, letters: str = "qkvo", kind: str = "weight") -> Names:
    return {f"{block}.attention.w{x}.{kind}": f"{THEIR_LAYER}.self_attn.{x}_proj.{kind}" for x in letters}


def gated(block: str = LAYER) -> Names:
    return {f"{block}.feed_forward.w_{x}.weight": f"{THEIR_LAYER}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}


def norms(**theirs: str) -> Names:
    places = {"attention": ATTENTION_READ, "ffn": FFN_READ, "attention_out": ATTENTION_OUT, "ffn_out": FFN_OUT}
    return {f"{places[place]}.weight": f"{THEIR_LAYER}.{name}.weight" for place, name in theirs.items()}


QK_NORMS: Names = {f"{LAYER}.attention.{x}_norm.weight": f"{THEIR_LAYER}.self_attn.{x}_norm.weight" for x in "qk"}
PRE_NORMS = norms(attention="input_layernorm", ffn="post_attention_layernorm")
GEMMA_NORMS = norms(
    attention="input_layernorm",
    attention_out="post_attention_layernorm",
    ffn="pre_feedforward_layernorm",
    ffn_out="post_feedforward_layernorm",
)
LLAMA: Names = OUTSIDE | attention() | gated() | PRE_NORMS

LATENT: Names = {
    f"{LAYER}.attention.{ours}.weight": f"{THEIR_LAYER}.self_attn.{theirs}.weight"
    for ours, theirs in {
        "wq_down": "q_a_proj",
        "q_norm": "q_a_layernorm",
        "wq": "q_b_proj",
        "wkv_down": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "wkv_up": "kv_b_proj",
        "wo": "o_proj",
    }.items()
}

PARALLEL = f"{LAYER}.parallel"
PARALLEL_READ = f"{LAYER}.before_parallel.read.norm"

GPT2: Names = {
    "tok_embeddings.weight": "transformer.wte.weight",
    "pos_embeddings.weight": "transformer.wpe.weight",
    **linear("after_layers.read.norm", "transformer.ln_f"),
    **linear(ATTENTION_READ, "transformer.h.{i}.ln_1"),
    **linear(FFN_READ, "transformer.h.{i}.ln_2"),
    **linear(f"{LAYER}.attention.wq", "transformer.h.{i}.attn.c_attn", turned(0, DIM)),
    **linear(f"{LAYER}.attention.wk", "transformer.h.{i}.attn.c_attn", turned(DIM, 2 * DIM)),
    **linear(f"{LAYER}.attention.wv", "transformer.h.{i}.attn.c_attn", turned(2 * DIM, 3 * DIM)),
    **linear(f"{LAYER}.attention.wo", "transformer.h.{i}.attn.c_proj", turned()),
    **linear(f"{LAYER}.feed_forward.w_up", "transformer.h.{i}.mlp.c_fc", turned()),
    **linear(f"{LAYER}.feed_forward.w_down", "transformer.h.{i}.mlp.c_proj", turned()),
}
GLM4: Names = {
    **OUTSIDE,
    **HEAD,
    **attention(),
    **attention(letters="qkv", kind="bias"),
    **norms(
        attention="input_layernorm",
        attention_out="post_self_attn_layernorm",
        ffn="post_attention_layernorm",
        ffn_out="post_mlp_layernorm",
    ),
    f"{LAYER}.feed_forward.w_gate.weight": (f"{THEIR_LAYER}.mlp.gate_up_proj.weight", rows(0, FFN)),
    f"{LAYER}.feed_forward.w_up.weight": (f"{THEIR_LAYER}.mlp.gate_up_proj.weight", rows(FFN, 2 * FFN)),
    f"{LAYER}.feed_forward.w_down.weight": f"{THEIR_LAYER}.mlp.down_proj.weight",
}
NEOX: Names = {
    "tok_embeddings.weight": "gpt_neox.embed_in.weight",
    "lm_head.weight": "lm_head.weight",
    **linear("after_layers.read.norm", "gpt_neox.final_layer_norm"),
    **linear(f"{PARALLEL}.attention_norm", "gpt_neox.layers.{i}.input_layernorm"),
    **linear(f"{PARALLEL}.feed_forward_norm", "gpt_neox.layers.{i}.post_attention_layernorm"),
    **linear(f"{PARALLEL}.attention.wq", "gpt_neox.layers.{i}.attention.query_key_value", of_three_in_each_head(0)),
    **linear(f"{PARALLEL}.attention.wk", "gpt_neox.layers.{i}.attention.query_key_value", of_three_in_each_head(1)),
    **linear(f"{PARALLEL}.attention.wv", "gpt_neox.layers.{i}.attention.query_key_value", of_three_in_each_head(2)),
    **linear(f"{PARALLEL}.attention.wo", "gpt_neox.layers.{i}.attention.dense"),
    **linear(f"{PARALLEL}.feed_forward.w_up", "gpt_neox.layers.{i}.mlp.dense_h_to_4h"),
    **linear(f"{PARALLEL}.feed_forward.w_down", "gpt_neox.layers.{i}.mlp.dense_4h_to_h"),
}
BLOOM: Names = {
    "tok_embeddings.weight": "transformer.word_embeddings.weight",
    **linear("before_layers.join.norm", "transformer.word_embeddings_layernorm"),
    **linear("after_layers.read.norm", "transformer.ln_f"),
    **linear(ATTENTION_READ, "transformer.h.{i}.input_layernorm"),
    **linear(FFN_READ, "transformer.h.{i}.post_attention_layernorm"),
    **linear(f"{LAYER}.attention.wq", "transformer.h.{i}.self_attention.query_key_value", of_three_in_each_head(0)),
    **linear(f"{LAYER}.attention.wk", "transformer.h.{i}.self_attention.query_key_value", of_three_in_each_head(1)),
    **linear(f"{LAYER}.attention.wv", "transformer.h.{i}.self_attention.query_key_value", of_three_in_each_head(2)),
    **linear(f"{LAYER}.attention.wo", "transformer.h.{i}.self_attention.dense"),
    **linear(f"{LAYER}.feed_forward.w_up", "transformer.h.{i}.mlp.dense_h_to_4h"),
    **linear(f"{LAYER}.feed_forward.w_down", "transformer.h.{i}.mlp.dense_4h_to_h"),
}
PHI: Names = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    **linear("lm_head", "lm_head"),
    **linear("after_layers.read.norm", "model.final_layernorm"),
    **linear(PARALLEL_READ, f"{THEIR_LAYER}.input_layernorm"),
    **attention(PARALLEL, "qkv"),
    **attention(PARALLEL, "qkv", "bias"),
    **linear(f"{PARALLEL}.attention.wo", f"{THEIR_LAYER}.self_attn.dense"),
    **linear(f"{PARALLEL}.feed_forward.w_up", f"{THEIR_LAYER}.mlp.fc1"),
    **linear(f"{PARALLEL}.feed_forward.w_down", f"{THEIR_LAYER}.mlp.fc2"),
}


@dataclass(frozen=True)
class Tiny:
    """A tiny model on either side."""

    their_config: str
    names: Names
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
    "llama": Tiny("LlamaConfig", LLAMA | HEAD, GROUPED, THEIR_GROUPED),
    "qwen3": Tiny("Qwen3Config", LLAMA | HEAD | QK_NORMS, WIDE_HEADS, THEIR_WIDE_HEADS),
    "deepseek_v3": Tiny(
        "DeepseekV3Config",
        OUTSIDE | HEAD | LATENT | gated() | PRE_NORMS,
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
    "gpt2": Tiny("GPT2Config", GPT2, {}, {"n_inner": FFN, "n_positions": 16}),
    "gemma2": Tiny(
        "Gemma2Config",
        OUTSIDE | attention() | gated() | GEMMA_NORMS,
        WIDE_HEADS | WINDOW | {"query_scale": 10**-0.5, "attention_cap": 2.0, "logit_cap": 3.0},
        THEIR_WIDE_HEADS
        | THEIR_WINDOW
        | {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Tiny(
        "Gemma3TextConfig",
        OUTSIDE | attention() | gated() | GEMMA_NORMS | QK_NORMS,
        WIDE_HEADS | WINDOW | {"query_scale": 10**-0.5},
        THEIR_WIDE_HEADS | THEIR_WINDOW | {"query_pre_attn_scalar": 10},
        n_layers=7,
    ),
    "olmo2": Tiny(
        "Olmo2Config",
        OUTSIDE
        | HEAD
        | attention()
        | gated()
        | QK_NORMS
        | norms(attention_out="post_attention_layernorm", ffn_out="post_feedforward_layernorm"),
        GROUPED,
        THEIR_GROUPED,
    ),
    "glm4": Tiny("Glm4Config", GLM4, WIDE_HEADS, THEIR_WIDE_HEADS),
    "cohere2": Tiny(
        "Cohere2Config",
        OUTSIDE
        | attention(PARALLEL)
        | gated(PARALLEL)
        | {f"{PARALLEL_READ}.weight": f"{THEIR_LAYER}.input_layernorm.weight"},
        GROUPED | WINDOW,
        THEIR_GROUPED | THEIR_WINDOW,
        n_layers=5,
    ),
    "gpt_neox": Tiny("GPTNeoXConfig", NEOX, {"dim": 64}, {"hidden_size": 64}),  # two pairs in a head turn
    "bloom": Tiny("BloomConfig", BLOOM, {"ffn_dim": 4 * DIM}),
    "phi": Tiny("PhiConfig", PHI, GROUPED, THEIR_GROUPED),
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


def expanded(names: Names, model: DecoderLM) -> dict[str, tuple[str, Pick]]:
    """The map of every layer, by the real names of the junctions around it."""
    found = {}
    last_kind = "parallel" if model.placement.parallel else "feed_forward"
    for ours, source in names.items():
        theirs, pick = (source, whole) if isinstance(source, str) else source
        for i in range(len(model.layers)) if "{i}" in theirs else (0,):
            before = "before_layers" if i == 0 else f"layers.{i - 1}.after_{last_kind}"
            name = ours.replace("after_layers", f"layers.{len(model.layers) - 1}.after_{last_kind}")
            for kind in ("attention", "parallel"):
                name = name.replace(f"layers.{{i}}.before_{kind}", before)
            found[name.replace("{i}", str(i))] = (theirs.replace("{i}", str(i)), pick)
    return found


def our_model(name: str, theirs: nn.Module, dtype: torch.dtype) -> DecoderLM:
    model = DecoderLM(our_config(name)).to(dtype).eval()
    official, ours = dict(theirs.named_parameters()), dict(model.named_parameters())
    sources = expanded(TINY[name].names, model)
    assert sorted(ours) == sorted(sources)
    with torch.no_grad():
        for key, (source, pick) in sources.items():
            part = pick(official[source])
            assert part.shape == ours[key].shape, key
            ours[key].copy_(part)
    return model


@pytest.fixture(params=TINY)
def name(request) -> str:
    return request.param


def test_the_map_is_complete(name):
    """Each entry of each official parameter is read once, each parameter of ours is written once."""
    theirs = their_model(name, torch.float32)
    our_model(name, theirs, torch.float32)
    official = dict(theirs.named_parameters())
    used: dict[str, list[int]] = {key: [] for key in official}
    for source, pick in expanded(TINY[name].names, DecoderLM(our_config(name))).values():
        numbers = torch.arange(official[source].numel()).reshape(official[source].shape)
        used[source] += pick(numbers).flatten().tolist()
    for key, entries in used.items():
        assert sorted(entries) == list(range(official[key].numel())), key


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
    official, parameters = dict(theirs.named_parameters()), dict(ours.named_parameters())
    for key, (source, pick) in expanded(TINY[name].names, ours).items():
        wanted = gradient(official[source])
        error = (gradient(parameters[key]) - pick(wanted)).abs().max().item()
        assert error <= 1e-9 * wanted.abs().max().item(), key


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_every_family_is_compared():
    assert set(TINY) == set(FAMILIES)
