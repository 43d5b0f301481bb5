"""The table of placements that was read by hand from transformers' code, and what an anatomy says in its words.

``tests/golden/norm_placement.json`` has one entry a model type: the placement, the kind of q/k norm, final and
embedding norms, whether sublayers are parallel, and the role of every norm by the pattern of its path (``*`` is an
index).
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normstream.inspect.anatomy import Anatomy, NormSite, StackAnatomy, Sublayer

TABLE = Path(__file__).parent.parent / "tests" / "golden" / "norm_placement.json"
KINDS = {"rms": "RMS", "layer": "LN"}
INNER = {"q": "inner_q_norm", "k": "inner_k_norm", "v": "inner_v_norm", "no_effect": "inner_no_effect"}
CORRECTIONS = {
    ("led", "encoder: layers.*.self_attn_layer_norm"): "trunk_after_mixer",  # the table's run padded 31 tokens to 512
    ("longformer", "encoder.layer.*.attention.output.LayerNorm"): "trunk_after_mixer",  # as led
    ("mra", "encoder.layer.*.attention.output.LayerNorm"): "trunk_after_other",  # attention returns zeros on a CPU
    ("prophetnet", "decoder: decoder.layers.*.self_attn_layer_norm"): "trunk_after_mixer",
    ("fnet", "encoder.layer.*.fourier.output.LayerNorm"): "trunk_after_mixer",  # in every layer, also in the first
    ("fnet", "encoder.layer.*.output.LayerNorm"): "trunk_after_ffn",
    ("funnel", "decoder.layers.*.ffn.layer_norm"): "trunk_after_ffn",
    ("t5gemma2", "encoder: text_model.layers.*.self_attn.q_norm"): "inner_q_norm",
    ("t5gemma2", "encoder: text_model.layers.*.self_attn.k_norm"): "inner_k_norm",
    ("gemma3n_text", "per_layer_projection_norm"): "pre_ffn",  # as in gemma4_text
    ("gemma3n_text", "layers.*.input_layernorm"): "pre_ffn+mixer",  # read by attention and the low-rank branch
    ("gemma3n_text", "layers.*.post_per_layer_input_norm"): "output_ffn",  # as in gemma4_text
    ("zamba", "layers.*.shared_transf.input_layernorm"): "pre_mixer",  # the shared block is inside the mixer's branch
    ("zamba", "layers.*.shared_transf.pre_ff_layernorm"): "inner_before_out_proj",
    ("zamba2", "layers.*.shared_transformer.input_layernorm"): "pre_mixer",
    ("zamba2", "layers.*.shared_transformer.pre_ff_layernorm"): "inner_before_out_proj",
    ("encoder-decoder", "decoder: decoder.cls.predictions.transform.LayerNorm"): "head",  # behind a matrix, as BERT's
}
"""Where transformers' code contradicts the table: family and pattern, and the role in the code."""
QK_CORRECTIONS = {"gemma3n_text": "per_head", "inkling2_text": "none", "inkling2_loop_text": "none"}
"""Likewise; Inkling 2 clips long queries and keys and leaves the others alone."""


@dataclass(frozen=True)
class Expected:
    """What the table says of one stack."""

    placement: str
    """The shape of it: pre, post, sandwich, reordered."""
    parallel: bool
    qk: str
    """none, per_head, flattened or latent."""
    final: bool
    embedding: bool
    roles: dict[str, frozenset[str]]
    """Pattern of the path: every role that its norms have."""
    widths: dict[str, str]
    """Pattern of the path: per_head or flattened."""
    facts: dict[str, str]
    """Pattern of the path: RMS or LN, and how the weight acts."""
    by_hand: bool
    """Whether the code was read by hand and agreed with the table."""


def read_table() -> dict[str, dict[str, Any]]:
    """By model type."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["models"]


def corrected(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A family's entry with ``CORRECTIONS``."""
    right = {pattern: {"role": role} for (family, pattern), role in CORRECTIONS.items() if family == name}
    norms = {pattern: entry["norms"][pattern] | right.get(pattern, {}) for pattern in entry["norms"]}
    for pattern in right:
        norms[pattern].pop("roles_seen", None)
    return {**entry, "norms": norms, "qk_norm": QK_CORRECTIONS.get(name, entry["qk_norm"])}


def expected_stacks(entry: Mapping[str, Any]) -> dict[str, Expected]:
    """What the table says of each stack of a family: ``main``, or ``encoder`` and ``decoder``."""
    names = {key.split(": ")[0] for key in entry["norms"] if ": " in key} or {"main"}
    return {name: _expected(entry, name) for name in sorted(names)}


def _expected(entry: Mapping[str, Any], stack: str) -> Expected:
    prefix = "" if stack == "main" else f"{stack}: "
    norms = {key.removeprefix(prefix): norm for key, norm in entry["norms"].items() if key.startswith(prefix)}
    roles = {pattern: frozenset(norm.get("roles_seen", {norm["role"]: 1})) for pattern, norm in norms.items()}
    found = {role for seen in roles.values() for role in seen}
    listed = bool(norms)
    return Expected(
        placement=_shape(entry["placement"]),
        parallel=entry["parallel"],
        qk=_qk(entry["qk_norm"], norms),
        final="final" in found if listed else bool(entry["final_norm"]),
        embedding="embedding" in found if listed else bool(entry["embedding_norm"]),
        roles=roles,
        widths={pattern: norm["width"] for pattern, norm in norms.items() if "width" in norm},
        facts={pattern: f"{norm['kind']} {norm['weight']}" for pattern, norm in norms.items()},
        by_hand=entry["verified"] and entry["probe"] == "right",
    )


def _shape(placement: str) -> str:
    shapes = {"post-LN (norm on the trunk after the add)": "post", "sandwich (pre + output norm)": "sandwich"}
    shapes |= {"reordered (output norm only, inside the branch)": "reordered"}
    shapes |= {"pre, parallel branches sharing one norm": "pre"}
    shapes |= {"trunk norm + output norm + interpolation": "output+trunk"}
    shapes |= {"sandwich (pre + output norm) / pre / pre+trunk": "sandwich"}  # of most sublayers
    return shapes.get(placement, placement)


def _qk(kind: str, norms: Mapping[str, Any]) -> str:
    """State-space mixers have norms on what acts as a query and a key; the table says none of them and lists them."""
    if kind != "none":
        return kind.removesuffix(" (MLA)")
    inner = {norm.get("width", "") for norm in norms.values() if norm["role"] in (INNER["q"], INNER["k"])}
    return ",".join(sorted(inner)) or "none"


def role(site: NormSite) -> str:
    """A norm's place in the table's words."""
    kinds = "+".join(sorted(set(site.feeds)))
    if site.place in ("pre", "output"):
        return f"{site.place}_{kinds}"
    if site.place == "trunk":
        return f"trunk_after_{kinds}"
    if site.place == "sub":
        return "inner_mlp" if "ffn" in site.feeds else "inner_before_out_proj"
    return INNER.get(site.place, site.place)


def pattern(path: str) -> str:
    """Indices become stars.

    >>> pattern("model.layers.3.norm1")
    'model.layers.*.norm1'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def differences(expected: Expected, stack: StackAnatomy, old: Mapping[str, str]) -> list[str]:
    """What an anatomy says otherwise than the table, in sentences; ``old`` maps its paths to the table's.

    Norms that the table does not list (in heads, which it was made without) are not compared.
    """
    listed = {site: name for site in stack.norms if (name := _listed(site, expected, old)) is not None}
    compared = tuple(listed) if expected.roles else stack.norms
    pairs = [
        ("placement", expected.placement, shape_of(stack)),
        ("parallel", expected.parallel, is_parallel(stack)),
        ("q/k norm", expected.qk, qk_of(stack.norms)),
        ("final norm", expected.final, any(site.place == "final" for site in compared)),
        ("embedding norm", expected.embedding, any(site.place == "embedding" for site in compared)),
    ]
    found = [f"{what}: {wanted} in the table, {got} found" for what, wanted, got in pairs if wanted != got]
    for name, roles in expected.roles.items():
        sites = [site for site, listed_as in listed.items() if listed_as == name]
        got = {role(site) for site in sites}
        if got != roles:
            found.append(f"{name}: {_words(roles)} in the table, {_words(got)} found")
        width = expected.widths.get(name)
        if width and (scopes := {_width(site) for site in sites}) - {width}:
            found.append(f"{name}: {width} in the table, {_words(scopes)} found")
    return found


def fact_differences(expected: Expected, stack: StackAnatomy, old: Mapping[str, str]) -> list[str]:
    """Norms whose kind or gain convention is another one than in the table."""
    found: dict[str, set[str]] = {}
    for site in stack.norms:
        if (name := _listed(site, expected, old)) is not None:
            found.setdefault(name, set()).add(f"{KINDS[site.facts.kind]} {site.facts.gain}")
    return [
        f"{name}: {expected.facts[name]} in the table, {_words(facts)} found"
        for name, facts in found.items()
        if facts != {expected.facts[name]}
    ]


def _listed(site: NormSite, expected: Expected, old: Mapping[str, str]) -> str | None:
    """The table's name of a norm: the table has paths of models without a head, so a prefix may come before."""
    path = pattern(old[site.call.path])
    before = {name: path.removesuffix(name) for name in expected.roles if path == name or path.endswith(f".{name}")}
    return next((name for name, prefix in before.items() if "*" not in prefix), None)


def _words(words: Iterable[str]) -> str:
    return " and ".join(sorted(words)) or "nothing"


def _width(site: NormSite) -> str:
    return "per_head" if site.scope == "per_head" else "flattened"


def shape_of(stack: StackAnatomy) -> str:
    """The placement of most of the sublayers with norms, in the table's words; some families mix several."""
    shapes = Counter(shape for sublayer in stack.sublayers if (shape := _sublayer_shape(sublayer)) != "none")
    return shapes.most_common(1)[0][0] if shapes else "none"


def _sublayer_shape(sublayer: Sublayer) -> str:
    norms = {"output": sublayer.output_norm, "pre": sublayer.pre_norm, "trunk": sublayer.trunk_norm}
    found = "+".join(name for name, call in norms.items() if call is not None)
    return {"": "none", "trunk": "post", "output+pre": "sandwich", "output": "reordered"}.get(found, found)


def is_parallel(stack: StackAnatomy) -> bool:
    """Whether a mixer and a feed-forward network stand side by side: two mixers or two networks are no such layer."""
    kinds = {sublayer.name: sublayer.kind for sublayer in stack.sublayers}
    return any(kinds[other] != sublayer.kind for sublayer in stack.sublayers for other in sublayer.parallel_to)


def qk_of(norms: Iterable[NormSite]) -> str:
    """none, per_head, flattened or latent."""
    norms = list(norms)
    if any(site.place in ("latent_q", "latent_kv") for site in norms):
        return "latent"
    return ",".join(sorted({_width(site) for site in norms if site.place in ("q", "k")})) or "none"


def summary(anatomy: Anatomy, old: Mapping[str, str]) -> dict[str, Any]:
    """An anatomy in the table's words, by stack: for families that the table does not have."""
    return {
        stack.name: {
            "placement": shape_of(stack),
            "parallel": is_parallel(stack),
            "norms": {
                name: _words({role(site) for site in stack.norms if pattern(old[site.call.path]) == name})
                for name in dict.fromkeys(pattern(old[site.call.path]) for site in stack.norms)
            },
        }
        for stack in anatomy.stacks
    }
