"""Our own names, for every family: sublayers, and the junctions that stand between them.

The junction in front of a layer's first sublayer is ``before_layers`` or the last one of the layer before; ``read``
holds the norms that a sublayer's input is made with, ``join`` those that an update goes through. ``DecoderLM`` has
these names. Encoders and image models have no class of ours yet; their names follow the same rule.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from normstream.checkpoints.conversion.formats.family import indices
from normstream.checkpoints.conversion.formats.table import Entry, Rows, only, write_out
from normstream.checkpoints.conversion.roles import Role
from normstream.checkpoints.conversion.settings import has_bias
from normstream.placements import get

OUTSIDE: Rows = {
    "tok_embeddings.weight": "token_embedding",
    "pos_embeddings.weight": "position_embedding",
    "type_embeddings.weight": "type_embedding",
    "before_layers.join.norm.weight": "embedding_norm",
    "lm_head.weight": "head",
    # Encoders and image models.
    "pooler.weight": "pooler",
    "mlm_head.dense.weight": "mlm_dense",
    "mlm_head.norm.weight": "mlm_norm",
    "mlm_head.bias": "mlm_bias",
    "next_sentence.weight": "next_sentence",
    "classifier.weight": "classifier",
    "class_token": "class_token",
    "image_positions": "image_positions",
    "patch_embedding.weight": "patch_embedding",
    "time_embedding.w_in.weight": "time_in",
    "time_embedding.w_out.weight": "time_out",
    "label_embedding.weight": "label_embedding",
    "final_modulation.weight": "final_modulation",
    "output.weight": "output",
}
SUBLAYERS: Rows = {
    "{block}.attention.wk.weight": "k",
    "{block}.attention.wv.weight": "v",
    "{block}.attention.wo.weight": "o",
    "{block}.attention.q_norm.weight": "q_norm",
    "{block}.attention.k_norm.weight": "k_norm",
    "{block}.attention.v_norm.weight": "v_norm",
    "{block}.feed_forward.w_gate.weight": "gate",
    "{block}.feed_forward.w_up.weight": "up",
    "{block}.feed_forward.w_down.weight": "down",
    "layers.{i}.modulation.weight": "modulation",
}
ORDINARY: Rows = {"{block}.attention.wq.weight": "q"}
LATENT: Rows = {
    "{block}.attention.wq_down.weight": "q_down",
    "{block}.attention.q_norm.weight": "latent_q_norm",
    "{block}.attention.wq.weight": "latent_q",
    "{block}.attention.wkv_down.weight": "kv_down",
    "{block}.attention.kv_norm.weight": "latent_kv_norm",
    "{block}.attention.wkv_up.weight": "kv_up",
}
SEQUENTIAL: Rows = {
    "{before}.join.norm_x.weight": "attention_x_norm",
    "{before}.read.c1": "attention_x_scale",
    "{before}.read.norm_y.weight": "attention_y_norm",
    "{before}.read.norm_in.weight": "attention_input_norm",
    "{before}.read.norm.weight": "attention_pre_norm",
    "layers.{i}.after_attention.join.norm_out.weight": "attention_output_norm",
    "layers.{i}.after_attention.join.norm.weight": "attention_trunk_norm",
    "layers.{i}.after_attention.join.norm_x.weight": "ffn_x_norm",
    "layers.{i}.after_attention.read.norm_y.weight": "ffn_y_norm",
    "layers.{i}.after_attention.read.norm_in.weight": "ffn_input_norm",
    "layers.{i}.after_attention.read.norm.weight": "ffn_pre_norm",
    "layers.{i}.after_feed_forward.join.norm_out.weight": "ffn_output_norm",
    "layers.{i}.after_feed_forward.join.norm.weight": "ffn_trunk_norm",
}
PARALLEL: Rows = {
    "{before}.read.norm.weight": "shared_pre_norm",
    "layers.{i}.parallel.attention_norm.weight": "attention_pre_norm",
    "layers.{i}.parallel.feed_forward_norm.weight": "ffn_pre_norm",
}
CLOSING: Rows = {
    "{end}.join.norm_x.weight": "final_x_norm",
    "{end}.read.norm_y.weight": "final_y_norm",
    "{end}.read.norm_in.weight": "final_norm",
}


def entries(settings: Mapping[str, Any], roles: set[Role]) -> dict[str, Entry]:
    """Our names of the tensors with these roles.

    >>> found = entries({"n_layers": 2, "placement": "pre"}, {Role("attention_pre_norm", 1), Role("final_norm")})
    >>> sorted(found)
    ['layers.0.after_feed_forward.read.norm.weight', 'layers.1.after_feed_forward.read.norm.weight']
    """
    parallel = get(settings["placement"]).parallel
    block, last = ("layers.{i}.parallel", "parallel") if parallel else ("layers.{i}", "feed_forward")
    end = f"layers.{settings['n_layers'] - 1}.after_{last}"
    rows = {
        **OUTSIDE,
        **SUBLAYERS,
        **(LATENT if settings.get("latent.kv_rank") else ORDINARY),
        **(PARALLEL if parallel else SEQUENTIAL),
        **(CLOSING if Role("final_y_norm") in roles else {"{end}.read.norm.weight": "final_norm"}),
    }
    rows = {name.replace("{block}", block).replace("{end}", end): row for name, row in rows.items()}

    def junction_before(layer: int) -> dict[str, str]:
        return {"before": f"layers.{layer - 1}.after_{last}" if layer else "before_layers"}

    numbers = replace(indices(settings), more=junction_before)
    return only(write_out(rows, numbers, lambda role: has_bias(role, settings)), roles)
