"""The official SiameseNorm models: language model, DeiT and DiT.

Mind the ends of DeiT: its last two norms have swapped names. ``blocks.0.pre_norm1`` norms y and ``blocks.0.post_norm1``
norms x, but the final ``pre_norm`` norms x and the final ``post_norm`` norms y. DiT's final norms are not swapped.

Source: Qwen-Applications/SiameseNorm at commit 70efa00: OLMo_model_hybrid_pre.py, deit-model-siamesenorm.py,
dit-model-siamesenorm.py.
"""

from collections.abc import Mapping
from typing import Any

from normstream.checkpoints.conversion.formats.family import Family, by_name
from normstream.checkpoints.conversion.formats.hf import keys
from normstream.checkpoints.conversion.formats.table import Rows, fused
from normstream.checkpoints.conversion.settings import Key
from normstream.models import DecoderConfig

LM: Rows = {
    "transformer.wte.weight": "token_embedding",
    "transformer.ff_out.weight": "head",
    "transformer.blocks.{i}.c1": "attention_x_scale",
    "transformer.blocks.{i}.attn_y_norm.weight": "attention_y_norm",
    "transformer.blocks.{i}.att_proj.weight": fused("q", "k", "v"),
    "transformer.blocks.{i}.q_norm.weight": "q_norm",
    "transformer.blocks.{i}.k_norm.weight": "k_norm",
    "transformer.blocks.{i}.v_norm.weight": "v_norm",
    "transformer.blocks.{i}.attn_out.weight": "o",
    "transformer.blocks.{i}.ff_norm.weight": "ffn_x_norm",
    "transformer.blocks.{i}.ff_y_norm.weight": "ffn_y_norm",
    "transformer.blocks.{i}.ff_input_norm.weight": "ffn_input_norm",
    "transformer.blocks.{i}.ff_proj.weight": fused("up", "gate"),
    "transformer.blocks.{i}.ff_out.weight": "down",
    "transformer.ln_f.weight": "final_x_norm",
    "transformer.ln_y_f.weight": "final_y_norm",
    "transformer.ln_final_f.weight": "final_norm",
}
DEIT: Rows = {
    "cls_token": "class_token",
    "pos_embed": "image_positions",
    "patch_embed.proj.weight": "patch_embedding",
    "blocks.{i}.post_norm1.weight": "attention_x_norm",
    "blocks.{i}.pre_norm1.weight": "attention_y_norm",
    "blocks.{i}.input_norm1.weight": "attention_input_norm",
    "blocks.{i}.attn.qkv.weight": fused("q", "k", "v"),
    "blocks.{i}.attn.proj.weight": "o",
    "blocks.{i}.post_norm2.weight": "ffn_x_norm",
    "blocks.{i}.pre_norm2.weight": "ffn_y_norm",
    "blocks.{i}.input_norm2.weight": "ffn_input_norm",
    "blocks.{i}.mlp.fc1.weight": "up",
    "blocks.{i}.mlp.fc2.weight": "down",
    "pre_norm.weight": "final_x_norm",  # swapped
    "post_norm.weight": "final_y_norm",  # swapped
    "final_norm.weight": "final_norm",
    "head.weight": "classifier",
}
DIT: Rows = {  # its norms of sums have no weights
    "pos_embed": "image_positions",
    "x_embedder.proj.weight": "patch_embedding",
    "t_embedder.mlp.0.weight": "time_in",
    "t_embedder.mlp.2.weight": "time_out",
    "y_embedder.embedding_table.weight": "label_embedding",
    "blocks.{i}.postnorm1.weight": "attention_x_norm",
    "blocks.{i}.prenorm1.weight": "attention_y_norm",
    "blocks.{i}.attn.qkv.weight": fused("q", "k", "v"),
    "blocks.{i}.attn.proj.weight": "o",
    "blocks.{i}.postnorm2.weight": "ffn_x_norm",
    "blocks.{i}.prenorm2.weight": "ffn_y_norm",
    "blocks.{i}.mlp.fc1.weight": "up",
    "blocks.{i}.mlp.fc2.weight": "down",
    "blocks.{i}.adaLN_modulation.1.weight": "modulation",
    "postnorm.weight": "final_x_norm",
    "prenorm.weight": "final_y_norm",
    "final_layer.adaLN_modulation.1.weight": "final_modulation",
    "final_layer.linear.weight": "output",
}

LM_CONVENTIONS = DecoderConfig(placement="siamese_hybrid_pre")
LM_KEYS = (
    *keys(d_model="dim", n_layers="n_layers", n_heads="n_heads", n_kv_heads="n_kv_heads", rope_theta="positions.theta"),
    *keys(layer_norm_eps="norm.eps", max_sequence_length="max_seq_len", weight_tying="tied"),
    Key("mlp_hidden_size", "ffn_dim", lambda both: both // 2, lambda one: 2 * one),
)
LM_FIXED = {
    **dict.fromkeys(("rope", "layer_norm_with_affine", "use_query_norm", "use_key_norm", "use_value_norm"), True),
    **dict.fromkeys(("ffn_norm", "ffn_residual_after_norm"), True),
    **dict.fromkeys(("alibi", "include_bias", "bias_for_layer_norm", "attn_norm"), False),
    **dict.fromkeys(("attention_layer_norm", "attn_residual_after_norm"), False),
    "layer_norm_type": "rms",
    "activation_type": "swiglu",
}
IMAGES = {
    "placement": "siamese",
    "bias": "all",
    "norm.kind": "layer",
    "norm.bias": True,
    "norm.gain": "plain",
    "norm.eps": 1e-6,
}


def vocabulary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of the embedding, which may be more than there are tokens.

    >>> vocabulary({"vocab_size": 50280, "embedding_size": 50304})
    {'vocab_size': 50304}
    """
    return {"vocab_size": config.get("embedding_size") or config["vocab_size"]}


def write_vocabulary(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``vocabulary``.

    >>> write_vocabulary({"vocab_size": 8})
    {'vocab_size': 8, 'embedding_size': 8}
    """
    return {"vocab_size": settings["vocab_size"], "embedding_size": settings["vocab_size"]}


def hidden_width(config: Mapping[str, Any]) -> dict[str, Any]:
    """Width of the feed-forward, given as a multiple of the model's.

    >>> hidden_width({"hidden_size": 8, "mlp_ratio": 4.0})
    {'ffn_dim': 32}
    """
    return {"ffn_dim": int(config.get("embed_dim", config.get("hidden_size")) * config["mlp_ratio"])}


def write_ratio(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``hidden_width``.

    >>> write_ratio({"dim": 8, "ffn_dim": 32})
    {'mlp_ratio': 4.0}
    """
    return {"mlp_ratio": settings["ffn_dim"] / settings["dim"]}


SIAMESE = by_name(
    (
        Family(
            "siamese_lm",
            LM,
            LM_KEYS,
            LM_CONVENTIONS,
            fixed=LM_FIXED,
            read_more=vocabulary,
            write_more=write_vocabulary,
        ),
        Family(
            "siamese_deit",
            DEIT,
            keys(
                embed_dim="dim",
                depth="n_layers",
                num_heads="n_heads",
                img_size="image_size",
                patch_size="patch_size",
                in_chans="channels",
                num_classes="n_classes",
            ),
            base=IMAGES,
            fixed={"qkv_bias": True},
            read_more=hidden_width,
            write_more=write_ratio,
        ),
        Family(
            "siamese_dit",
            DIT,
            keys(
                hidden_size="dim",
                depth="n_layers",
                num_heads="n_heads",
                input_size="image_size",
                patch_size="patch_size",
                in_channels="channels",
                num_classes="n_classes",
                class_dropout_prob="label_dropout",
                learn_sigma="learn_sigma",
            ),
            base=IMAGES,
            read_more=hidden_width,
            write_more=write_ratio,
        ),
    )
)
"""The official models by our names for them; each is also the name of its format, with a dash."""
