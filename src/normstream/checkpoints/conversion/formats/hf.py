"""The families of transformers: their configurations, next to their role tables in ``hf_tables.py``."""

from collections.abc import Mapping
from typing import Any

from normstream.checkpoints.conversion.formats import hf_tables as tables
from normstream.checkpoints.conversion.formats.family import Family, by_name
from normstream.checkpoints.conversion.settings import Key


def keys(**names: str) -> tuple[Key, ...]:
    """Keys that say the same as a setting.

    >>> keys(hidden_size="dim")[0].ours
    'dim'
    """
    return tuple(Key(theirs, ours) for theirs, ours in names.items())


def window_by_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers see a window only, from ``layer_types``.

    Raises ValueError for a pattern other than "every k-th layer sees all".

    >>> window_by_layer({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8})
    {'window': 8, 'full_every': 2}
    """
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    full = [index for index, kind in enumerate(types) if kind != "sliding_attention"]
    if len(full) == len(types):
        return {"window": None, "full_every": 0}
    every = full[0] + 1 if full else len(types) + 1
    if full != list(range(every - 1, len(types), every)) or set(types) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types must have a full layer every k layers for this conversion, got {types}")
    return {"window": config["sliding_window"], "full_every": every if full else 0}


def layer_types(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``window_by_layer``.

    >>> layer_types({"n_layers": 2, "window": None})
    {'layer_types': ['full_attention', 'full_attention']}
    """
    if settings["window"] is None:
        return {"layer_types": ["full_attention"] * settings["n_layers"]}
    every = settings["full_every"] or settings["n_layers"] + 1
    full = [layer % every == every - 1 for layer in range(settings["n_layers"])]
    kinds = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    return {"sliding_window": settings["window"], "layer_types": kinds}


def qwen_layer_types(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``layer_types``, and the switch without which Qwen forgets the window.

    >>> qwen_layer_types({"n_layers": 1, "window": None})
    {'layer_types': ['full_attention'], 'use_sliding_window': False}
    """
    return layer_types(settings) | {"use_sliding_window": settings["window"] is not None}


def experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of DeepSeek-V3; nothing where all layers are dense.

    >>> experts({"first_k_dense_replace": 2, "num_hidden_layers": 2})
    {}
    """
    n_dense = config["first_k_dense_replace"]
    if n_dense >= config["num_hidden_layers"]:
        return {}
    found: dict[str, Any] = {f"moe.{ours}": config[theirs] for theirs, ours in EXPERTS.items()}
    return found | {"moe.n_dense": n_dense, "moe.shared_ffn_dim": found["moe.ffn_dim"] * found["moe.n_shared"]}


def write_experts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``experts``.

    >>> write_experts({"n_layers": 2})
    {'first_k_dense_replace': 2}
    """
    if "moe.n_experts" not in settings:
        return {"first_k_dense_replace": settings["n_layers"]}
    found = {theirs: settings[f"moe.{ours}"] for theirs, ours in EXPERTS.items()}
    return found | {"first_k_dense_replace": settings["moe.n_dense"]}


EXPERTS = {
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "n_chosen",
    "moe_intermediate_size": "ffn_dim",
    "n_shared_experts": "n_shared",
    "n_group": "n_groups",
    "topk_group": "n_groups_chosen",
    "norm_topk_prob": "normalized",
    "routed_scaling_factor": "scale",
}


def inverse_square(scale: float) -> float:
    """``scale ** -2``, the integer where it is one up to rounding.

    >>> inverse_square(256**-0.5)
    256
    """
    value = scale**-2
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def bias_if(given: bool) -> str:
    """Biases of queries, keys and values, or none.

    >>> bias_if(True)
    'qkv'
    """
    return "qkv" if given else "none"


SIZES = keys(
    vocab_size="vocab_size",
    hidden_size="dim",
    num_hidden_layers="n_layers",
    num_attention_heads="n_heads",
    intermediate_size="ffn_dim",
    max_position_embeddings="max_seq_len",
)
GROUPED = keys(num_key_value_heads="n_kv_heads")
HEAD_DIM = keys(head_dim="head_dim")
TIED = keys(tie_word_embeddings="tied")
THETA = (Key("rope_parameters.rope_theta", "positions.theta"),)
PARTIAL = (*THETA, Key("rope_parameters.partial_rotary_factor", "positions.fraction"))
RMS, LAYER = keys(rms_norm_eps="norm.eps"), keys(layer_norm_eps="norm.eps")
QUERY_SCALE = (Key("query_pre_attn_scalar", "query_scale", lambda scalar: scalar**-0.5, inverse_square),)
CAPS = keys(attn_logit_softcapping="attention_cap", final_logit_softcapping="logit_cap")
LLAMA_LIKE = (*SIZES, *GROUPED, *TIED, *THETA, *RMS)
ROPE = ("rope_parameters",)
SILU = {"hidden_act": "silu"}
GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
NO_BIAS = {"attention_bias": False}
LATENT_SIZES = (
    Key("q_lora_rank", "latent.q_rank", read=lambda rank: rank or 0, write=lambda rank: rank or None),
    Key("kv_lora_rank", "latent.kv_rank"),
    Key("qk_nope_head_dim", "latent.nope_head_dim"),
    Key("qk_rope_head_dim", "latent.rope_head_dim"),
    Key("v_head_dim", "latent.v_head_dim"),
)
GEMMA3_THETAS = (
    Key("rope_parameters.full_attention.rope_theta", "positions.theta"),
    Key("rope_parameters.sliding_attention.rope_theta", "positions.local_theta"),
)
GEMMA3_ROPE = ("rope_parameters.full_attention", "rope_parameters.sliding_attention")
GPT2_KEYS = keys(
    vocab_size="vocab_size", n_embd="dim", n_layer="n_layers", n_head="n_heads", n_inner="ffn_dim",
    n_positions="max_seq_len", layer_norm_epsilon="norm.eps", tie_word_embeddings="tied",
)  # fmt: skip
BLOOM_KEYS = keys(
    vocab_size="vocab_size", hidden_size="dim", n_layer="n_layers", n_head="n_heads",
    layer_norm_epsilon="norm.eps", tie_word_embeddings="tied",
)  # fmt: skip
ENCODER = {"bias": "all", "norm.kind": "layer", "norm.bias": True, "norm.gain": "plain"}
POST, PRE = ENCODER | {"placement": "post"}, ENCODER | {"placement": "pre"}
OLD_CAUSAL_MASKS = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)
OLD_TABLES = (r".*\.rotary_emb\.inv_freq",)

HF = by_name(
    (
        Family(
            "llama", tables.LLAMA, LLAMA_LIKE + HEAD_DIM, "llama", prefix="model.",
            rope=ROPE, fixed=SILU | NO_BIAS | {"mlp_bias": False}, constants=OLD_TABLES,
        ),
        Family(
            "mistral", tables.LLAMA, LLAMA_LIKE + HEAD_DIM + keys(sliding_window="window"), "llama", prefix="model.",
            rope=ROPE, fixed=SILU, constants=OLD_TABLES,
        ),
        Family(
            "qwen2", tables.LLAMA, LLAMA_LIKE, "llama", base={"bias": "qkv"}, prefix="model.",
            rope=ROPE, fixed=SILU, read_more=window_by_layer, write_more=qwen_layer_types, constants=OLD_TABLES,
        ),
        Family(
            "qwen3", tables.QWEN3, LLAMA_LIKE + HEAD_DIM, "qwen3", prefix="model.",
            rope=ROPE, fixed=SILU | NO_BIAS, read_more=window_by_layer, write_more=qwen_layer_types,
        ),
        Family(
            "olmo", tables.OLMO, (*SIZES, *GROUPED, *TIED, *THETA), "olmo", prefix="model.",
            rope=ROPE, fixed=SILU | NO_BIAS | {"clip_qkv": None},
        ),
        Family(
            "olmo2", tables.OLMO2, LLAMA_LIKE, "olmo2", prefix="model.",
            rope=ROPE, fixed=SILU | NO_BIAS,
        ),
        Family(
            "gemma2", tables.GEMMA2, LLAMA_LIKE + HEAD_DIM + QUERY_SCALE + CAPS, "gemma2", prefix="model.",
            rope=ROPE, fixed=GEMMA_ACTIVATION, read_more=window_by_layer, write_more=layer_types,
        ),
        Family(
            "gemma3_text", tables.GEMMA3,
            (*SIZES, *GROUPED, *TIED, *RMS, *HEAD_DIM, *QUERY_SCALE, *CAPS, *GEMMA3_THETAS), "gemma3", prefix="model.",
            rope=GEMMA3_ROPE, fixed=GEMMA_ACTIVATION, read_more=window_by_layer,
            write_more=layer_types,
        ),
        Family(
            "glm4", tables.GLM4,
            (*SIZES, *GROUPED, *TIED, *PARTIAL, *RMS, *HEAD_DIM,
             Key("attention_bias", "bias", read=bias_if, write=lambda bias: bias == "qkv")),
            "glm4", prefix="model.", rope=ROPE, fixed=SILU,
        ),
        Family(
            "cohere2", tables.COHERE2,
            (*SIZES, *GROUPED, *TIED, *THETA, *LAYER, *HEAD_DIM, *keys(logit_scale="logit_multiplier")), "cohere2",
            prefix="model.", rope=ROPE, fixed=SILU | NO_BIAS, read_more=window_by_layer,
            write_more=layer_types,
        ),
        Family(
            "phi", tables.PHI, (*SIZES, *GROUPED, *TIED, *PARTIAL, *LAYER), "phi", prefix="model.",
            rope=ROPE, fixed={"hidden_act": "gelu_new", "qk_layernorm": False},
        ),
        Family(
            "gpt2", tables.GPT2, GPT2_KEYS, "gpt2", prefix="transformer.",
            fixed={"activation_function": "gelu_new", "scale_attn_weights": True, "add_cross_attention": False,
                   "scale_attn_by_inverse_layer_idx": False},
            constants=OLD_CAUSAL_MASKS,
        ),
        Family(
            "gpt_neox", tables.GPT_NEOX, (*SIZES, *TIED, *PARTIAL, *LAYER), "gpt_neox", prefix="gpt_neox.",
            rope=ROPE, fixed={"hidden_act": "gelu", "attention_bias": True, "use_parallel_residual": True},
            constants=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        ),
        Family(
            "bloom", tables.BLOOM, BLOOM_KEYS, "bloom", prefix="transformer.",
            fixed={"apply_residual_connection_post_layernorm": False},
        ),
        Family(
            "deepseek_v3", tables.deepseek_v3, (*SIZES, *GROUPED, *TIED, *THETA, *RMS, *LATENT_SIZES), "deepseek_v3",
            prefix="model.", rope=ROPE, fixed=SILU | NO_BIAS | {"rope_interleave": True},
            read_more=experts, write_more=write_experts,
        ),
        Family(
            "bert", tables.BERT, (*SIZES, *LAYER, *keys(type_vocab_size="n_types", hidden_act="activation")),
            base=POST, prefix="bert.", optional=tables.BERT_HEADS,
            fixed={"is_decoder": False, "add_cross_attention": False}, copies=tables.BERT_COPIES,
            constants=(r"(bert\.)?embeddings\.position_ids",),
        ),
        Family(
            "vit", tables.VIT,
            (*keys(hidden_size="dim", num_hidden_layers="n_layers", num_attention_heads="n_heads",
                   intermediate_size="ffn_dim", image_size="image_size", patch_size="patch_size",
                   num_channels="channels", hidden_act="activation"), *LAYER),
            base=PRE, prefix="vit.", optional=tables.VIT_HEADS,
            fixed={"qkv_bias": True},
        ),
    )
)  # fmt: skip
"""Families by ``model_type``."""
