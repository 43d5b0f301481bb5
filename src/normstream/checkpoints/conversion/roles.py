"""What a tensor is for, whatever a format calls it: the words that all formats are translated through.

A role is a name of ``ROLES``, with the layer, the expert and the part (weight or bias) that it belongs to. Every matrix
maps input to output with its rows as outputs, queries, keys and values are apart, and so are gate and up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Part = Literal["weight", "bias"]

ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    # Around the layers.
    "token_embedding": ("embedding of tokens", ("vocab", "dim")),
    "position_embedding": ("table of learned positions", ("positions", "dim")),
    "type_embedding": ("embedding of segments", ("types", "dim")),
    "embedding_norm": ("norm of the embedding", ("dim",)),
    "final_norm": ("norm after the last layer", ("dim",)),
    "final_x_norm": ("norm of the x stream after the last layer", ("dim",)),
    "final_y_norm": ("norm of the y stream after the last layer", ("dim",)),
    "head": ("output matrix", ("vocab", "dim")),
    # Norms of a layer. The first word says which sublayer they belong to.
    "attention_pre_norm": ("norm before attention", ("dim",)),
    "attention_output_norm": ("norm of attention's output, before it is added", ("dim",)),
    "attention_trunk_norm": ("norm of the stream after attention was added (Post-Norm)", ("dim",)),
    "ffn_pre_norm": ("norm before the feed-forward", ("dim",)),
    "ffn_output_norm": ("norm of the feed-forward's output, before it is added", ("dim",)),
    "ffn_trunk_norm": ("norm of the stream after the feed-forward was added (Post-Norm)", ("dim",)),
    "shared_pre_norm": ("norm before attention and feed-forward, which run side by side", ("dim",)),
    # SiameseNorm: x is the normed stream, y the raw sum.
    "attention_x_norm": ("norm of the x stream before attention", ("dim",)),
    "attention_x_scale": ("learned scale of the x stream before attention", ("dim",)),
    "attention_y_norm": ("norm of the y stream before attention", ("dim",)),
    "attention_input_norm": ("norm of both streams' sum before attention", ("dim",)),
    "ffn_x_norm": ("norm of the x stream before the feed-forward", ("dim",)),
    "ffn_y_norm": ("norm of the y stream before the feed-forward", ("dim",)),
    "ffn_input_norm": ("norm of both streams' sum before the feed-forward", ("dim",)),
    # Attention.
    "q": ("queries", ("q", "dim")),
    "k": ("keys", ("kv", "dim")),
    "v": ("values", ("kv", "dim")),
    "o": ("output matrix of attention", ("dim", "heads_out")),
    "q_norm": ("norm of queries", ("q_gain",)),
    "k_norm": ("norm of keys", ("k_gain",)),
    "v_norm": ("norm of values", ("v_gain",)),
    "q_down": ("latent vector of queries", ("q_rank", "dim")),
    "latent_q_norm": ("norm of the latent vector of queries", ("q_rank",)),
    "latent_q": ("queries of latent attention", ("q", "q_in")),
    "kv_down": ("latent vector of keys and values, and the rotated key", ("kv_down", "dim")),
    "latent_kv_norm": ("norm of the latent vector of keys and values", ("kv_rank",)),
    "kv_up": ("keys and values from the latent vector", ("kv_up", "kv_rank")),
    # Feed-forward.
    "gate": ("gate of the feed-forward", ("ffn", "dim")),
    "up": ("first matrix of the feed-forward", ("ffn", "dim")),
    "down": ("output matrix of the feed-forward", ("dim", "ffn")),
    "router": ("router of the experts", ("experts", "dim")),
    "router_bias": ("correction of the router's choice", ("experts",)),
    "expert_gate": ("gate of an expert", ("expert_ffn", "dim")),
    "expert_up": ("first matrix of an expert", ("expert_ffn", "dim")),
    "expert_down": ("output matrix of an expert", ("dim", "expert_ffn")),
    "shared_gate": ("gate of the shared expert", ("shared_ffn", "dim")),
    "shared_up": ("first matrix of the shared expert", ("shared_ffn", "dim")),
    "shared_down": ("output matrix of the shared expert", ("dim", "shared_ffn")),
    # Heads of encoders.
    "pooler": ("dense layer on the first token", ("dim", "dim")),
    "mlm_dense": ("dense layer of the masked-token head", ("dim", "dim")),
    "mlm_norm": ("norm of the masked-token head", ("dim",)),
    "mlm_bias": ("bias of the masked-token head", ("vocab",)),
    "next_sentence": ("head that says whether the second text follows", ("pairs", "dim")),
    "classifier": ("classification head", ("classes", "dim")),
    # Images.
    "class_token": ("vector of the class token", ("one", "one", "dim")),
    "patch_embedding": ("embedding of patches", ("dim", "channels", "patch", "patch")),
    "image_positions": ("table of positions of patches", ("one", "tokens", "dim")),
    "time_in": ("first layer of the time embedding", ("dim", "frequencies")),
    "time_out": ("second layer of the time embedding", ("dim", "dim")),
    "label_embedding": ("embedding of labels", ("labels", "dim")),
    "modulation": ("shifts, scales and gates of a layer", ("six_dims", "dim")),
    "final_modulation": ("shift and scale after the last layer", ("two_dims", "dim")),
    "output": ("output matrix to pixels", ("pixels", "dim")),
}
"""What each name means, and its shape in the words of ``sizes``."""

NORMS = frozenset(name for name in ROLES if name.endswith("_norm"))
"""Roles of norms."""


@dataclass(frozen=True)
class Role:
    """A place for one tensor in a model.

    >>> str(Role("ffn_pre_norm", layer=1))
    'layer 1 ffn_pre_norm (norm before the feed-forward)'
    """

    name: str
    """A key of ``ROLES``."""
    layer: int | None = None
    """Index from 0; None outside the layers."""
    expert: int | None = None
    """Index from 0; None for what is no expert's."""
    part: Part = "weight"
    """The bias of the same module has the same role otherwise."""

    @property
    def module(self) -> "Role":
        """The same place, whichever part."""
        return replace(self, part="weight")

    @property
    def is_norm(self) -> bool:
        """Whether it is the gain or bias of a norm."""
        return self.name in NORMS

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer} "
        which = "" if self.expert is None else f"expert {self.expert} "
        part = " bias" if self.part == "bias" else ""
        return f"{where}{which}{self.name}{part} ({ROLES[self.name][0]})"


def sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    """The lengths that shapes of roles are given in, as far as the settings (see ``settings.py``) have them.

    >>> sizes({"dim": 8, "n_heads": 4, "n_kv_heads": 2, "head_dim": 2})["kv"]
    4
    """
    dim, n_heads = settings["dim"], settings["n_heads"]
    n_kv_heads = settings.get("n_kv_heads") or n_heads
    head_dim = settings.get("head_dim") or dim // n_heads
    per_head = settings.get("inner.qk_statistics", "head") == "head"
    known: dict[str, int | None] = {
        "dim": dim,
        "vocab": settings.get("vocab_size"),
        "positions": settings.get("max_seq_len"),
        "ffn": settings.get("ffn_dim"),
        "head_dim": head_dim,
        "q": n_heads * head_dim,
        "kv": n_kv_heads * head_dim,
        "heads_out": n_heads * head_dim,
        "q_gain": head_dim if per_head else n_heads * head_dim,
        "k_gain": head_dim if per_head else n_kv_heads * head_dim,
        "v_gain": head_dim,
        "six_dims": 6 * dim,
        "two_dims": 2 * dim,
        "one": 1,
        "types": settings.get("n_types"),
        "channels": settings.get("channels"),
        "patch": settings.get("patch_size"),
        "experts": settings.get("moe.n_experts"),
        "expert_ffn": settings.get("moe.ffn_dim"),
        "shared_ffn": settings.get("moe.shared_ffn_dim"),
    }
    if settings.get("latent.kv_rank"):
        known |= _latent_sizes(settings, n_heads, dim)
    return {name: size for name, size in known.items() if size is not None}


def _latent_sizes(settings: Mapping[str, Any], n_heads: int, dim: int) -> dict[str, int]:
    kv_rank, q_rank = settings["latent.kv_rank"], settings["latent.q_rank"]
    nope, rope, value = (settings[f"latent.{name}"] for name in ("nope_head_dim", "rope_head_dim", "v_head_dim"))
    return {
        "q": n_heads * (nope + rope),
        "q_rank": q_rank,
        "q_in": q_rank or dim,
        "kv_rank": kv_rank,
        "kv_down": kv_rank + rope,
        "kv_up": n_heads * (nope + value),
        "heads_out": n_heads * value,
    }


def shape_of(role: Role, lengths: Mapping[str, int]) -> tuple[int | None, ...]:
    """The shape that a role's tensor has, None for a length that the settings do not tell.

    >>> shape_of(Role("q", 0), {"q": 8, "dim": 4}), shape_of(Role("q", 0, part="bias"), {"q": 8, "dim": 4})
    ((8, 4), (8,))
    """
    _, names = ROLES[role.name]
    return tuple(lengths.get(name) for name in (names if role.part == "weight" else names[:1]))
