"""Megatron and NeMo: the names of a GPT model of Megatron-Core, whole (tensor and pipeline parallel size 1).

There are two layouts of norms. With local modules each norm stands alone; with Transformer Engine a norm is fused into
the matrix that reads it and has the name of an attribute of that, ``layer_norm_weight``. Where several matrices read a
norm (experts, latent attention) it stands alone in both. Reading accepts either for every single norm.

    role                     stand-alone                              fused
    attention_pre_norm       input_layernorm.weight                   self_attention.linear_qkv.layer_norm_weight
    attention_output_norm    post_self_attn_layernorm.weight          self_attention.linear_proj.post_layernorm.weight
    ffn_pre_norm             pre_mlp_layernorm.weight                 mlp.linear_fc1.layer_norm_weight
    ffn_output_norm          post_mlp_layernorm.weight                mlp.linear_fc2.post_layernorm.weight
    latent_q_norm            self_attention.q_layernorm.weight        self_attention.linear_q_up_proj.layer_norm_weight
    latent_kv_norm           self_attention.kv_layernorm.weight       self_attention.linear_kv_up_proj.layer_norm_weight

Source: NVIDIA/Megatron-LM, megatron/core/models/gpt and megatron/core/transformer; the output norms of the fused layout
NVIDIA-NeMo/Megatron-Bridge, models/gemma.
"""

from collections.abc import Mapping
from typing import Any

from normstream.checkpoints.conversion.formats.family import Family, indices
from normstream.checkpoints.conversion.formats.table import Entry, Rows, fused, only, write_out
from normstream.checkpoints.conversion.roles import Role
from normstream.checkpoints.conversion.settings import Key, Settings, has_bias, read_keys, write_keys
from normstream.layers.feed_forward import is_gated

LAYER = "decoder.layers.{i}"
OUTSIDE: Rows = {
    "embedding.word_embeddings.weight": "token_embedding",
    "embedding.position_embeddings.weight": "position_embedding",
    "decoder.final_layernorm.weight": "final_norm",
    "output_layer.weight": "head",
}
MATRICES: Rows = {
    f"{LAYER}.self_attention.linear_qkv.weight": fused("q", "k", "v", order="groups"),
    f"{LAYER}.self_attention.linear_proj.weight": "o",
    f"{LAYER}.mlp.linear_fc1.weight": fused("gate", "up"),
    f"{LAYER}.mlp.linear_fc2.weight": "down",
    # Latent attention.
    f"{LAYER}.self_attention.linear_q_down_proj.weight": "q_down",
    f"{LAYER}.self_attention.linear_kv_down_proj.weight": "kv_down",
    f"{LAYER}.self_attention.linear_kv_up_proj.weight": "kv_up",
    # Experts.
    f"{LAYER}.mlp.router.weight": "router",
    f"{LAYER}.mlp.router.expert_bias": "router_bias",
    f"{LAYER}.mlp.experts.linear_fc1.weight{{e}}": fused("expert_gate", "expert_up"),
    f"{LAYER}.mlp.experts.linear_fc2.weight{{e}}": "expert_down",
    f"{LAYER}.mlp.shared_experts.linear_fc1.weight": fused("shared_gate", "shared_up"),
    f"{LAYER}.mlp.shared_experts.linear_fc2.weight": "shared_down",
}
STAND_ALONE: Rows = {
    f"{LAYER}.input_layernorm.weight": "attention_pre_norm",
    f"{LAYER}.post_self_attn_layernorm.weight": "attention_output_norm",
    f"{LAYER}.pre_mlp_layernorm.weight": "ffn_pre_norm",
    f"{LAYER}.post_mlp_layernorm.weight": "ffn_output_norm",
}
STAND_ALONE_LATENT: Rows = {
    f"{LAYER}.self_attention.q_layernorm.weight": "latent_q_norm",
    f"{LAYER}.self_attention.kv_layernorm.weight": "latent_kv_norm",
}
FUSED: Rows = {
    f"{LAYER}.self_attention.linear_proj.post_layernorm.weight": "attention_output_norm",
    "decoder.layers.{dense}.mlp.linear_fc1.layer_norm_weight": "ffn_pre_norm",
    "decoder.layers.{moe}.pre_mlp_layernorm.weight": "ffn_pre_norm",  # the router and all experts read it
    f"{LAYER}.mlp.linear_fc2.post_layernorm.weight": "ffn_output_norm",
}
FUSED_ORDINARY: Rows = {f"{LAYER}.self_attention.linear_qkv.layer_norm_weight": "attention_pre_norm"}
FUSED_LATENT: Rows = {
    f"{LAYER}.input_layernorm.weight": "attention_pre_norm",  # both down projections read it
    f"{LAYER}.self_attention.linear_q_up_proj.layer_norm_weight": "latent_q_norm",
    f"{LAYER}.self_attention.linear_kv_up_proj.layer_norm_weight": "latent_kv_norm",
}
QK_NORM: Rows = {
    f"{LAYER}.self_attention.q_layernorm.weight": "q_norm",
    f"{LAYER}.self_attention.k_layernorm.weight": "k_norm",
}

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
KINDS = {"rms": "RMSNorm", "layer": "LayerNorm"}
POSITIONS = {"rotary": "rope", "learned": "learned_absolute"}


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """From values to keys.

    >>> inverse({"rms": "RMSNorm"})
    {'RMSNorm': 'rms'}
    """
    return {value: key for key, value in table.items()}


SIZES = (
    Key("num_layers", "n_layers"),
    Key("hidden_size", "dim"),
    Key("ffn_hidden_size", "ffn_dim"),
    Key("num_attention_heads", "n_heads"),
    Key("num_query_groups", "n_kv_heads"),
    Key("kv_channels", "head_dim"),
    Key("vocab_size", "vocab_size"),
    Key("max_position_embeddings", "max_seq_len"),
    Key("share_embeddings_and_output_weights", "tied"),
    Key("normalization", "norm.kind", inverse(KINDS).get, KINDS.get),
    Key("layernorm_epsilon", "norm.eps"),
    Key("position_embedding_type", "positions.kind", inverse(POSITIONS).get, POSITIONS.get),
    Key("softmax_scale", "query_scale"),
    Key("attn_logit_softcapping", "attention_cap"),
    Key("final_logit_softcapping", "logit_cap"),
    Key("window_size", "window", lambda pair: pair and pair[0] + 1, lambda window: window and [window - 1, 0]),
    Key("window_attn_skip_freq", "full_every"),
    Key("qk_layernorm", "inner.qk", lambda given: "model" if given else "none", lambda kind: kind != "none"),
)
ROTARY = (
    Key("rotary_base", "positions.theta"),
    Key("rotary_base_local", "positions.local_theta"),
    Key("rotary_percent", "positions.fraction"),
    Key("rotary_interleaved", "positions.pairing", lambda given: "interleaved" if given else "half", "half".__ne__),
)
NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "layernorm_epsilon", "rotary_base")
"""Arguments without which a model would get the values of another one, unnoticed."""
LATENT = (
    Key("q_lora_rank", "latent.q_rank", lambda rank: rank or 0, lambda rank: rank or None),
    Key("kv_lora_rank", "latent.kv_rank"),
    Key("qk_head_dim", "latent.nope_head_dim"),
    Key("qk_pos_emb_head_dim", "latent.rope_head_dim"),
    Key("v_head_dim", "latent.v_head_dim"),
)
EXPERTS = (
    Key("num_moe_experts", "moe.n_experts"),
    Key("moe_router_topk", "moe.n_chosen"),
    Key("moe_ffn_hidden_size", "moe.ffn_dim"),
    Key("moe_shared_expert_intermediate_size", "moe.shared_ffn_dim"),
    Key("moe_router_num_groups", "moe.n_groups"),
    Key("moe_router_group_topk", "moe.n_groups_chosen"),
    Key("moe_router_topk_scaling_factor", "moe.scale"),
)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's switch rope_scaling takes for granted."""
YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys of YaRN that have the same names in MLATransformerConfig."""
STRETCHED = "rope.rope_parameters."
EXPRESSED = frozenset({"pre", "gpt2", "gemma2", "gemma3", "glm4"})
"""Placements that Megatron-Core's layers have."""


def entries(settings: Mapping[str, Any], roles: set[Role], *, is_fused: bool) -> dict[str, Entry]:
    """The names of the tensors with these roles in one layout.

    >>> roles = {Role("ffn_pre_norm", 0)}
    >>> list(entries({"n_layers": 1}, roles, is_fused=True))
    ['decoder.layers.0.mlp.linear_fc1.layer_norm_weight']
    """
    latent, low_rank = settings.get("latent.kv_rank"), settings.get("latent.q_rank")
    queries = "linear_q_up_proj" if low_rank else "linear_q_proj"
    rows = {
        **OUTSIDE,
        **MATRICES,
        f"{LAYER}.self_attention.{queries}.weight": "latent_q",
        **({} if latent else QK_NORM),
        **(FUSED if is_fused else STAND_ALONE),
    }
    if is_fused:
        rows |= FUSED_LATENT if latent else FUSED_ORDINARY
    elif latent:
        rows |= STAND_ALONE_LATENT
    return only(write_out(rows, indices(settings), lambda role: has_bias(role, settings)), roles)


def as_found(settings: Mapping[str, Any], roles: set[Role], names: set[str]) -> dict[str, Entry]:
    """``entries``, each norm in the layout that it has among ``names``; stand-alone where it is in neither.

    >>> names = {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight"}
    >>> as_found({"n_layers": 1}, {Role("ffn_pre_norm", 0)}, names).keys() == names
    True
    """
    alone, joined = (entries(settings, roles, is_fused=is_fused) for is_fused in (False, True))
    present = {entry.roles for name, entry in alone.items() if name in names}
    chosen = {name: entry for name, entry in joined.items() if name in names}
    taken = {entry.roles for entry in chosen.values()}
    return chosen | {name: e for name, e in alone.items() if e.roles not in taken or e.roles in present}


def check(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for what Megatron-Core's GPT layers do not compute.

    >>> check({"placement": "post"})
    Traceback (most recent call last):
    ValueError: Megatron-Core has no layer with the placement 'post'; it has those of gemma2, gemma3, glm4, gpt2, pre
    """
    if settings.get("placement") not in EXPRESSED:
        raise ValueError(
            f"Megatron-Core has no layer with the placement {settings.get('placement')!r}; it has those of "
            f"{', '.join(sorted(EXPRESSED))}"
        )
    if settings["norm.gain"] == "none":
        raise ValueError("norms without gains have no counterpart in Megatron-Core; take the format hf or normstream")


def arguments(settings: Settings, zero_centered: bool) -> dict[str, Any]:
    """The arguments of Megatron-Core's TransformerConfig and GPTModel for a model.

    Raises ValueError as ``check``.
    """
    check(settings)
    found = write_keys(SIZES, settings)
    if settings["positions.kind"] == "rotary":
        found |= write_keys(ROTARY, settings) | _stretching(settings)
    found |= {
        "layernorm_zero_centered_gamma": zero_centered,
        "add_bias_linear": settings["bias"] == "all",
        "add_qkv_bias": settings["bias"] in ("qkv", "all"),
        "gated_linear_unit": is_gated(settings["activation"]),
        "activation_func": ACTIVATIONS[settings["activation"]],
        "multi_latent_attention": settings["latent.kv_rank"] > 0,
    }
    if settings["latent.kv_rank"]:
        found |= write_keys(LATENT, settings)
    if "moe.n_experts" in settings:
        n_dense, n_layers = settings["moe.n_dense"], settings["n_layers"]
        found |= write_keys(EXPERTS, settings)
        found |= {"moe_layer_freq": [int(layer >= n_dense) for layer in range(n_layers)]}
    return found


def _stretching(settings: Settings) -> dict[str, Any]:
    """Arguments of stretched rotary positions."""
    given = {key.removeprefix(STRETCHED): value for key, value in settings.items() if key.startswith("rope.")}
    if not given:
        return {}
    kind, factor = given.pop("rope_type", None), given.pop("factor", None)
    if kind == "llama3" and given == LLAMA3:
        return {"rope_scaling": True, "rope_scaling_factor": factor}
    if kind == "yarn" and settings["latent.kv_rank"] and given.keys() == set(YARN):
        return {"rope_type": "yarn", "rotary_scaling_factor": factor, **given}
    raise ValueError(f"Megatron-Core has no argument for rotary positions stretched by {given | {'rope_type': kind}}")


def _from_stretching(given: Mapping[str, Any]) -> Settings:
    """The inverse of ``_stretching``."""
    if given.get("rope_scaling"):
        found = {"rope_type": "llama3", "factor": given["rope_scaling_factor"], **LLAMA3}
    elif given.get("rope_type") == "yarn":
        found = {"rope_type": "yarn", "factor": given["rotary_scaling_factor"], **{key: given[key] for key in YARN}}
    else:
        found = {}
    return {f"{STRETCHED}{key}": value for key, value in found.items()}


def from_arguments(family: Family, given: Mapping[str, Any]) -> Settings:
    """The settings of a model of a family with these arguments.

    Raises ValueError where the arguments are those of another family, or lack what no tensor shows.
    """
    found = read_keys((*SIZES, *ROTARY, *LATENT), given) | _experts(given) | _from_stretching(given)
    settings = family.complete(found)
    wanted = arguments(settings, given.get("layernorm_zero_centered_gamma", False))
    if missing := [key for key in NEEDED if key in wanted and key not in given]:
        raise ValueError(f"the arguments of the model lack {', '.join(missing)}; add what it was trained with")
    for key, value in wanted.items():
        if key in given and given[key] != value:
            raise ValueError(f"{key} is {given[key]!r}, but a model of the family {family.name} has {value!r}")
    if "layernorm_zero_centered_gamma" in given:
        settings["norm.gain"] = "zero_centered" if given["layernorm_zero_centered_gamma"] else "plain"
    return settings


def _experts(given: Mapping[str, Any]) -> Settings:
    """Settings of experts; what Megatron has no argument for is the same in all models of the family."""
    if not given.get("num_moe_experts"):
        return {}
    frequency = given["moe_layer_freq"]
    found = read_keys(EXPERTS, given) | {"moe.n_dense": frequency.index(1), "moe.normalized": True}
    return found | {"moe.n_shared": found["moe.shared_ffn_dim"] // found["moe.ffn_dim"]}
