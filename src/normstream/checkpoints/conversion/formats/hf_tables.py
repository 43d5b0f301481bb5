"""Role tables of the families of transformers, with the names that ``save_pretrained`` writes.

Mind the norms: one name has several meanings. ``post_attention_layernorm`` is the norm before the feed-forward in Llama
and GLM-4, and the norm of attention's output in Gemma 2, Gemma 3 and OLMo 2.

Source: huggingface/transformers, models/<family>/modeling_<family>.py.
"""

from collections.abc import Mapping
from typing import Any

from normstream.checkpoints.conversion.formats.table import Rows, fused, transposed

OUTSIDE: Rows = {
    "model.embed_tokens.weight": "token_embedding",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "head",
}
ATTENTION: Rows = {
    "model.layers.{i}.self_attn.q_proj.weight": "q",
    "model.layers.{i}.self_attn.k_proj.weight": "k",
    "model.layers.{i}.self_attn.v_proj.weight": "v",
    "model.layers.{i}.self_attn.o_proj.weight": "o",
}
GATED: Rows = {
    "model.layers.{i}.mlp.gate_proj.weight": "gate",
    "model.layers.{i}.mlp.up_proj.weight": "up",
    "model.layers.{i}.mlp.down_proj.weight": "down",
}
QK_NORM: Rows = {
    "model.layers.{i}.self_attn.q_norm.weight": "q_norm",
    "model.layers.{i}.self_attn.k_norm.weight": "k_norm",
}

LLAMA: Rows = {
    **OUTSIDE,
    **ATTENTION,
    **GATED,
    "model.layers.{i}.input_layernorm.weight": "attention_pre_norm",
    "model.layers.{i}.post_attention_layernorm.weight": "ffn_pre_norm",
}
QWEN3: Rows = LLAMA | QK_NORM

OLMO: Rows = {  # its norms have no weights
    "model.embed_tokens.weight": "token_embedding",
    "lm_head.weight": "head",
    **ATTENTION,
    **GATED,
}
OLMO2: Rows = {
    **OUTSIDE,
    **ATTENTION,
    **QK_NORM,
    **GATED,
    "model.layers.{i}.post_attention_layernorm.weight": "attention_output_norm",
    "model.layers.{i}.post_feedforward_layernorm.weight": "ffn_output_norm",
}
GEMMA2: Rows = {
    **OUTSIDE,
    **ATTENTION,
    **GATED,
    "model.layers.{i}.input_layernorm.weight": "attention_pre_norm",
    "model.layers.{i}.post_attention_layernorm.weight": "attention_output_norm",
    "model.layers.{i}.pre_feedforward_layernorm.weight": "ffn_pre_norm",
    "model.layers.{i}.post_feedforward_layernorm.weight": "ffn_output_norm",
}
GEMMA3: Rows = GEMMA2 | QK_NORM

GLM4: Rows = {
    **OUTSIDE,
    **ATTENTION,
    "model.layers.{i}.mlp.gate_up_proj.weight": fused("gate", "up"),
    "model.layers.{i}.mlp.down_proj.weight": "down",
    "model.layers.{i}.input_layernorm.weight": "attention_pre_norm",
    "model.layers.{i}.post_self_attn_layernorm.weight": "attention_output_norm",
    "model.layers.{i}.post_attention_layernorm.weight": "ffn_pre_norm",
    "model.layers.{i}.post_mlp_layernorm.weight": "ffn_output_norm",
}
COHERE2: Rows = {
    **OUTSIDE,
    **ATTENTION,
    **GATED,
    "model.layers.{i}.input_layernorm.weight": "shared_pre_norm",
}
PHI: Rows = {
    "model.embed_tokens.weight": "token_embedding",
    "model.final_layernorm.weight": "final_norm",
    "lm_head.weight": "head",
    "model.layers.{i}.input_layernorm.weight": "shared_pre_norm",
    "model.layers.{i}.self_attn.q_proj.weight": "q",
    "model.layers.{i}.self_attn.k_proj.weight": "k",
    "model.layers.{i}.self_attn.v_proj.weight": "v",
    "model.layers.{i}.self_attn.dense.weight": "o",
    "model.layers.{i}.mlp.fc1.weight": "up",
    "model.layers.{i}.mlp.fc2.weight": "down",
}
GPT2: Rows = {
    "transformer.wte.weight": "token_embedding",
    "transformer.wpe.weight": "position_embedding",
    "transformer.ln_f.weight": "final_norm",
    "lm_head.weight": "head",
    "transformer.h.{i}.ln_1.weight": "attention_pre_norm",
    "transformer.h.{i}.attn.c_attn.weight": fused("q", "k", "v", transposed=True),
    "transformer.h.{i}.attn.c_proj.weight": transposed("o"),
    "transformer.h.{i}.ln_2.weight": "ffn_pre_norm",
    "transformer.h.{i}.mlp.c_fc.weight": transposed("up"),
    "transformer.h.{i}.mlp.c_proj.weight": transposed("down"),
}
GPT_NEOX: Rows = {
    "gpt_neox.embed_in.weight": "token_embedding",
    "gpt_neox.final_layer_norm.weight": "final_norm",
    "embed_out.weight": "head",
    "gpt_neox.layers.{i}.input_layernorm.weight": "attention_pre_norm",
    "gpt_neox.layers.{i}.attention.query_key_value.weight": fused("q", "k", "v", order="groups"),
    "gpt_neox.layers.{i}.attention.dense.weight": "o",
    "gpt_neox.layers.{i}.post_attention_layernorm.weight": "ffn_pre_norm",
    "gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight": "up",
    "gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight": "down",
}
BLOOM: Rows = {
    "transformer.word_embeddings.weight": "token_embedding",
    "transformer.word_embeddings_layernorm.weight": "embedding_norm",
    "transformer.ln_f.weight": "final_norm",
    "lm_head.weight": "head",
    "transformer.h.{i}.input_layernorm.weight": "attention_pre_norm",
    "transformer.h.{i}.self_attention.query_key_value.weight": fused("q", "k", "v", order="groups"),
    "transformer.h.{i}.self_attention.dense.weight": "o",
    "transformer.h.{i}.post_attention_layernorm.weight": "ffn_pre_norm",
    "transformer.h.{i}.mlp.dense_h_to_4h.weight": "up",
    "transformer.h.{i}.mlp.dense_4h_to_h.weight": "down",
}

LATENT_ATTENTION: Rows = {
    "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight": "kv_down",
    "model.layers.{i}.self_attn.kv_a_layernorm.weight": "latent_kv_norm",
    "model.layers.{i}.self_attn.kv_b_proj.weight": "kv_up",
    "model.layers.{i}.self_attn.o_proj.weight": "o",
}
LATENT_QUERIES: Rows = {
    "model.layers.{i}.self_attn.q_a_proj.weight": "q_down",
    "model.layers.{i}.self_attn.q_a_layernorm.weight": "latent_q_norm",
    "model.layers.{i}.self_attn.q_b_proj.weight": "latent_q",
}
PLAIN_QUERIES: Rows = {"model.layers.{i}.self_attn.q_proj.weight": "latent_q"}
DEEPSEEK_V3: Rows = {
    **OUTSIDE,
    **LATENT_ATTENTION,
    "model.layers.{i}.input_layernorm.weight": "attention_pre_norm",
    "model.layers.{i}.post_attention_layernorm.weight": "ffn_pre_norm",
    "model.layers.{dense}.mlp.gate_proj.weight": "gate",
    "model.layers.{dense}.mlp.up_proj.weight": "up",
    "model.layers.{dense}.mlp.down_proj.weight": "down",
    "model.layers.{moe}.mlp.gate.weight": "router",
    "model.layers.{moe}.mlp.gate.e_score_correction_bias": "router_bias",
    "model.layers.{moe}.mlp.experts.{e}.gate_proj.weight": "expert_gate",
    "model.layers.{moe}.mlp.experts.{e}.up_proj.weight": "expert_up",
    "model.layers.{moe}.mlp.experts.{e}.down_proj.weight": "expert_down",
    "model.layers.{moe}.mlp.shared_experts.gate_proj.weight": "shared_gate",
    "model.layers.{moe}.mlp.shared_experts.up_proj.weight": "shared_up",
    "model.layers.{moe}.mlp.shared_experts.down_proj.weight": "shared_down",
}


def deepseek_v3(settings: Mapping[str, Any]) -> Rows:
    """The table, with queries through a latent vector or (V2-Lite) straight from the input.

    >>> deepseek_v3({"latent.q_rank": 0})["model.layers.{i}.self_attn.q_proj.weight"]
    'latent_q'
    """
    return {**DEEPSEEK_V3, **(LATENT_QUERIES if settings["latent.q_rank"] else PLAIN_QUERIES)}


BERT: Rows = {
    "bert.embeddings.word_embeddings.weight": "token_embedding",
    "bert.embeddings.position_embeddings.weight": "position_embedding",
    "bert.embeddings.token_type_embeddings.weight": "type_embedding",
    "bert.embeddings.LayerNorm.weight": "embedding_norm",
    "bert.encoder.layer.{i}.attention.self.query.weight": "q",
    "bert.encoder.layer.{i}.attention.self.key.weight": "k",
    "bert.encoder.layer.{i}.attention.self.value.weight": "v",
    "bert.encoder.layer.{i}.attention.output.dense.weight": "o",
    "bert.encoder.layer.{i}.attention.output.LayerNorm.weight": "attention_trunk_norm",
    "bert.encoder.layer.{i}.intermediate.dense.weight": "up",
    "bert.encoder.layer.{i}.output.dense.weight": "down",
    "bert.encoder.layer.{i}.output.LayerNorm.weight": "ffn_trunk_norm",
}
BERT_HEADS: Mapping[str, Rows] = {
    "pooler": {"bert.pooler.dense.weight": "pooler"},
    "mlm": {
        "cls.predictions.transform.dense.weight": "mlm_dense",
        "cls.predictions.transform.LayerNorm.weight": "mlm_norm",
        "cls.predictions.bias": "mlm_bias",
    },
    "next_sentence": {"cls.seq_relationship.weight": "next_sentence"},
    "classifier": {"classifier.weight": "classifier"},
}
BERT_COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
VIT: Rows = {
    "vit.embeddings.cls_token": "class_token",
    "vit.embeddings.position_embeddings": "image_positions",
    "vit.embeddings.patch_embeddings.projection.weight": "patch_embedding",
    "vit.encoder.layer.{i}.layernorm_before.weight": "attention_pre_norm",
    "vit.encoder.layer.{i}.attention.attention.query.weight": "q",
    "vit.encoder.layer.{i}.attention.attention.key.weight": "k",
    "vit.encoder.layer.{i}.attention.attention.value.weight": "v",
    "vit.encoder.layer.{i}.attention.output.dense.weight": "o",
    "vit.encoder.layer.{i}.layernorm_after.weight": "ffn_pre_norm",
    "vit.encoder.layer.{i}.intermediate.dense.weight": "up",
    "vit.encoder.layer.{i}.output.dense.weight": "down",
    "vit.layernorm.weight": "final_norm",
}
VIT_HEADS: Mapping[str, Rows] = {
    "pooler": {"vit.pooler.dense.weight": "pooler"},
    "classifier": {"classifier.weight": "classifier"},
}
