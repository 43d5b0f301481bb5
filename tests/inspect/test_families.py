"""The probe on about twenty families, against a table that people made by reading transformers' code.

The probe sees scrambled models: no class, module or parameter name, no model type, and gains and eps drawn at random.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.inspect_all import AGREEMENTS, FILE, compare, count, probe_family
from benchmarks.placement_table import read_table, role
from benchmarks.results import RESULTS
from benchmarks.scramble import scramble
from benchmarks.tiny_models import tiny_model
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy, NormSite
from normstream.inspect.inputs import make_inputs
from normstream.inspect.probing.probe import anatomy_of

TABLE = read_table()
FAMILIES = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "olmo", "olmo2", "glm4", "gpt2", "deepseek_v3", "bert", "t5", "bart"),
    *("albert", "gte", "granite", "bloom", "cohere2", "phi", "qwen3_moe", "olmoe", "modernbert", "opt", "mamba"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_scrambled_family_is_as_in_the_table(name: str) -> None:
    row = probe_family(name, TABLE[name])
    assert row["status"] == "probed", row
    assert [difference for stack in row["stacks"].values() for difference in stack["differences"]] == []
    assert row["notes"] == []


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "bart", "albert"])
def test_names_gains_and_eps_make_no_difference(name: str) -> None:
    plain = anatomy_of(tiny_model(name, seed=0))
    scrambled = tiny_model(name, seed=1)
    old = scramble(scrambled)
    assert not set(old) & set(old.values()) - {""}, "a module kept its name"
    assert _by_path(anatomy_of(scrambled), old) == _by_path(plain, {})


def _by_path(anatomy: Anatomy, old: Mapping[str, str]) -> list[Any]:
    """Every norm's place under its old name, without what the random seed decides."""
    return [
        (stack.name, old.get(site.call.path, site.call.path), site.call.index, _without_names(site))
        for stack in anatomy.stacks
        for site in stack.norms
    ]


def _without_names(site: NormSite) -> Any:
    facts = dataclasses.replace(site.facts, path="", eps=None)
    return site.place, site.feeds, site.sublayers, site.layer, site.scope, facts


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("llama", "model.layers.1.post_attention_layernorm", "pre_ffn"),
        ("glm4", "model.layers.1.post_attention_layernorm", "pre_ffn"),
        ("gemma2", "model.layers.1.post_attention_layernorm", "output_mixer"),
        ("olmo2", "model.layers.1.post_attention_layernorm", "output_mixer"),
        ("gte", "gte.layers.1.post_attention_layernorm", "trunk_after_mixer"),
    ],
)
def test_one_name_with_three_meanings(name: str, path: str, expected: str) -> None:
    anatomy = anatomy_of(tiny_model(name))
    assert [role(site) for site in anatomy.norms if site.call.path == path] == [expected]


# Names that lie ---------------------------------------------------------------------------------------------------


class LayerNorm(nn.Module):
    """Attention, in truth."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.weight = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.norm(x).chunk(3, -1)
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return self.weight(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)


class Attention(nn.Module):
    """An RMS norm, in truth."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.q_proj.shape, self.q_proj, 1e-5)


class Dropout(nn.Module):
    """A feed-forward network, in truth."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.embed(x)))


class Liar(nn.Module):
    """A layer whose names say Post-Norm and whose equations are another placement's."""

    def __init__(self, dim: int, placement: str) -> None:
        super().__init__()
        self.placement = placement
        self.post_norm, self.output_norm = Attention(dim), Attention(dim)
        self.mlp, self.attention = LayerNorm(dim), Dropout(dim)

    def forward(self, x: Tensor) -> Tensor:
        for norm, branch in ((self.post_norm, self.mlp), (self.output_norm, self.attention)):
            if self.placement == "pre":
                x = x + branch(norm(x))
            elif self.placement == "output":
                x = x + norm(branch(x))
            else:
                x = norm(x + branch(x))
        return x


class LiarModel(nn.Module):
    def __init__(self, placement: str, dim: int = 32) -> None:
        super().__init__()
        self.lm_head = nn.Embedding(50, dim)
        self.final_norms = nn.ModuleList(Liar(dim, placement) for _ in range(2))
        self.embed_tokens = nn.Linear(dim, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.lm_head(input_ids)
        for layer in self.final_norms:
            x = layer(x)
        return self.embed_tokens(x)


@pytest.mark.parametrize(
    ("placement", "roles"),
    [
        ("pre", ["pre_mixer", "pre_ffn"]),
        ("output", ["output_mixer", "output_ffn"]),
        ("trunk", ["trunk_after_mixer", "trunk_after_ffn"]),
    ],
)
def test_names_that_lie(placement: str, roles: list[str]) -> None:
    torch.manual_seed(0)
    anatomy = anatomy_of(LiarModel(placement))
    (stack,) = anatomy.stacks
    assert [role(site) for site in stack.norms] == 2 * roles
    assert [sublayer.kind for sublayer in stack.sublayers] == 2 * ["mixer", "ffn"]
    assert str(anatomy.head) == "embed_tokens"
    assert not anatomy.is_tied


# The comparison itself --------------------------------------------------------------------------------------------


def test_the_comparison_notices_every_kind_of_error() -> None:
    model = tiny_model("gemma2")
    anatomy = anatomy_of(model, make_inputs(model))
    old = {path: path for path, _ in model.named_modules()}
    assert compare(anatomy, TABLE["gemma2"], old)["main"]["differences"] == []
    others = {name: compare(anatomy, TABLE[name], old)["main"]["differences"] for name in ("glm4", "llama", "cohere2")}
    assert any("post_attention_layernorm: pre_ffn in the table, output_mixer found" in d for d in others["glm4"])
    assert "placement: pre in the table, sandwich found" in others["llama"]
    assert "parallel: True in the table, False found" in others["cohere2"]


def test_the_committed_result_is_complete_and_reaches_what_is_claimed() -> None:
    """Placement right for every family of the table, the rest of the structure in at least 97 % of its stacks."""
    record = json.loads((RESULTS / FILE).read_text(encoding="utf-8"))
    rows = record["families"]
    assert {name for name in TABLE if "stacks" not in rows[name]} == set()
    assert count(rows) == record["totals"]
    stacks = [stack for row in rows.values() for stack in row.get("stacks", {}).values()]
    agree = {what: sum(holds(stack) for stack in stacks) / len(stacks) for what, holds in AGREEMENTS.items()}
    assert agree["placement"] == 1
    assert agree["placement, q/k, final and embedding norm"] >= 0.97
    assert agree["likewise, table corrected where the code contradicts it"] >= 0.97
