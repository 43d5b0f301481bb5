"""Sizes of tiny models, by the names of the fields of transformers' configuration classes."""

from typing import Any

VOCAB_SIZE = 128
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
"""Instead of ids that do not fit into the vocabulary."""

_FIELDS: dict[int, str] = {
    # Vocabularies.
    VOCAB_SIZE: """
        vocab_size unpadded_vocab_size vocab_size_per_layer_input entity_vocab_size t2u_vocab_size
        src_vocab_size tgt_vocab_size shape_vocab_size pronunciation_vocab_size unit_hifi_gan_vocab_size
        encoder_hash_byte_group_vocab
    """,
    # Width of the stream, and what has the same width in some families.
    32: """
        hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size pooler_hidden_size
        hidden_size_global d_latents lru_width mm_embed_dim text_hidden_size projection_hidden_dim
        out_hidden_size vision_output_dim projection_dim
    """,
    # Width of feed-forward networks and of experts.
    48: """
        intermediate_size moe_intermediate_size shared_expert_intermediate_size n_inner encoder_ffn_dim
        decoder_ffn_dim ffn_dim d_ff dff dim_ff hidden_dim ffn_hidden_size d_inner shared_intermediate_size
        expert_ffn_hidden_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim speech_encoder_intermediate_size
        shared_experts_intermediate_size feed_forward_size
    """,
    # Depth, heads, experts.
    4: """
        num_hidden_layers num_layers n_layer n_layers num_decoder_layers num_attention_heads
        encoder_attention_heads decoder_attention_heads n_head n_heads num_heads swa_num_attention_heads
        linear_num_key_heads linear_num_value_heads linear_num_heads mamba_n_heads
        speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads index_n_heads
        time_step_rank adaptor_kernel_size num_experts n_routed_experts num_local_experts moe_num_experts
    """,
    # Depth of encoder-decoders, heads of keys and values, experts of a token.
    2: """
        encoder_layers decoder_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers
        num_global_layers global_num_layers local_num_layers depth num_key_value_heads num_kv_heads
        swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k zero_expert_num
        num_self_attends_per_block num_self_attention_heads num_cross_attention_heads n_input_layers
        n_recurrent_layers n_output_layers n_layers_per_attn_res_block patch_size
    """,
    # Width of a head, and of low-rank vectors smaller than it.
    8: """
        head_dim d_kv d_head dim_head kv_channels v_head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim
        index_head_dim global_head_dim swa_head_dim d_rel linear_key_head_dim linear_value_head_dim
        linear_head_dim state_size mamba_d_state ssm_state_size hidden_size_per_layer_input laurel_rank
        image_size
    """,
    # Other widths, and windows of attention.
    16: """
        qk_head_dim q_lora_rank kv_lora_rank o_lora_rank mamba_d_head sliding_window entity_emb_size
        intra_bottleneck_size shape_embed_dim pronunciation_embed_dim rel_extent sliding_window_size
        router_hidden_size embedding_rank unit_embed_dim lang_embed_dim spkr_embed_dim local_attention
    """,
    # Width of a state-space mixer.
    64: "mamba_d_ssm",
    # One group of experts; the first layer dense.
    1: "n_group topk_group num_expert_group n_shared_experts first_k_dense_replace",
    # Lengths: any sequence of up to 64 tokens fits.
    100: "max_position_embeddings n_positions max_seq_len max_source_positions",
    # No further stacks that predict more tokens, no layers that reuse others' keys.
    0: "num_nextn_predict_layers num_kv_shared_layers",
}
SIZES: dict[str, Any] = {field: size for size, fields in _FIELDS.items() for field in fields.split()} | {
    "use_cache": False
}
"""Values by field name; a field that a configuration class lacks is left out."""

_ALL_HEADS = {"num_key_value_heads": 4}  # multi-head latent attention has as many keys as queries
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "axk1": _ALL_HEADS,
    "axk2": _ALL_HEADS,
    "bailing_hybrid": _ALL_HEADS | {"layer_group_size": 2},
    "bert": {"num_hidden_layers": 2},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    },
    "deepseek_v2": _ALL_HEADS,
    "deepseek_v3": _ALL_HEADS,
    "deepseek_v32": _ALL_HEADS,
    "dots3_note_text": _ALL_HEADS,
    "dory": {"num_hidden_layers": 6},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "esmc": _ALL_HEADS,
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "_sliding_window_pattern": 2},
    "glm4_moe_lite": _ALL_HEADS,
    "glm_moe_dsa": _ALL_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
        "logits_scaling": 4.0,
    },
    "kimi_linear": _ALL_HEADS | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "longformer": {"attention_window": [16] * 4},
    "led": {"attention_window": [16] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": _ALL_HEADS,
    "mamba2": {"num_heads": 8},
    "minicpm3": _ALL_HEADS,
    "neomme": {"head_dim": 16},
    "phi": _ALL_HEADS,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8], "attention_head_size": 8},
    "sarvam_mla": _ALL_HEADS,
    "vit": {"image_size": 32, "patch_size": 8},
    "xmod": {"default_language": "en_XX"},
    "youtu": _ALL_HEADS,
    "zamba": {"num_hidden_layers": 8, "attn_layer_period": 3, "attn_layer_offset": 2, "num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides ``SIZES``."""
NEVER_TINY = {"vibevoice_asr"}
"""Sizes are not in the configuration."""
