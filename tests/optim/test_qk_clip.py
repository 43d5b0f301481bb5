"""One batch is replayed in float64 after clipping at 5 what were logits in the hundreds and thousands."""

import math

import pytest
import torch
from torch import Tensor, nn

from normstream import RMSNorm
from normstream.layers import Attention, Context, LatentConfig
from normstream.layers.latent_attention import LatentAttention
from normstream.layers.positions import rope_table
from normstream.optim import QKClip, QKClipConfig

TAU = 5.0
DIM, HEADS = 16, 4


def attention(n_kv_heads: int = HEADS, bias: bool = False) -> Attention:
    made = Attention(DIM, n_heads=HEADS, n_kv_heads=n_kv_heads, head_dim=4, layer=0, bias=bias).double()
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(std=3.0)
    return made


def latent() -> LatentAttention:
    sizes = LatentConfig(kv_rank=8, q_rank=6, nope_head_dim=4, rope_head_dim=2, v_head_dim=3)
    norms = RMSNorm(8, eps=1e-6), RMSNorm(6, eps=1e-6)
    made = LatentAttention(DIM, n_heads=HEADS, sizes=sizes, layer=0, kv_norm=norms[0], q_norm=norms[1]).double()
    with torch.no_grad():
        for p in made.parameters():
            if p.ndim == 2:
                p.normal_(std=5.0)
    return made


def quiet(module: Attention | LatentAttention, head: int) -> None:
    """Brings one head under the threshold."""
    with torch.no_grad():
        module.wq.weight.unflatten(0, (HEADS, -1))[head] *= 1e-5
        if module.wq.bias is not None:
            module.wq.bias.unflatten(0, (HEADS, -1))[head] *= 1e-5


def run(clip: QKClip, module: nn.Module, rope_dim: int) -> list[float]:
    """The largest logit of each head for one fixed batch, scaled by 10 so that logits are large."""
    z = 10 * torch.randn(2, 7, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rope = rope_table(torch.arange(7)[None], rope_dim, 1e4, torch.float64)
    with torch.no_grad(), clip.watching():
        module(z, Context(rope=rope))
    return clip.max_logits()[0]


def rows(parameter: Tensor) -> Tensor:
    return parameter.detach().unflatten(0, (HEADS, -1)).clone()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("alpha", [0.5, 0.0, 0.3, 1.0])
def test_heads_with_their_own_keys_come_to_the_threshold(alpha: float, bias: bool):
    module = attention(bias=bias)
    quiet(module, 2)
    clip = QKClip(module, TAU, QKClipConfig(alpha=alpha))
    before = run(clip, module, rope_dim=4)
    assert max(before) > 1000
    assert before[2] < TAU
    assert [int(clip.n_over()), clip.largest().item()] == [3, max(before)]
    old = {name: p.detach().clone() for name, p in module.named_parameters()}
    clip.clip()
    after = run(clip, module, rope_dim=4)
    assert [after[h] for h in (0, 1, 3)] == pytest.approx([TAU] * 3, rel=1e-12)
    assert after[2] == before[2]
    gamma = torch.tensor([TAU / s for s in before], dtype=torch.float64)
    for name, p in module.named_parameters():
        power = {"wq": alpha, "wk": 1 - alpha}.get(name.split(".")[0], 0.0)
        for head in range(HEADS):
            expected = rows(old[name])[head] * (1.0 if head == 2 else gamma[head] ** power)
            torch.testing.assert_close(rows(p)[head], expected, rtol=1e-12, atol=0)
            if head == 2 or power == 0:
                assert torch.equal(rows(p)[head], rows(old[name])[head])


def test_recorded_logit_is_the_signed_maximum_of_what_attends():
    module = attention()
    z = torch.randn(1, 5, DIM, dtype=torch.float64)
    clip = QKClip(module, TAU)
    with torch.no_grad(), clip.watching():
        module(z, Context())
        q, k = (w(z)[0].unflatten(-1, (HEADS, 4)) for w in (module.wq, module.wk))
    logits = torch.einsum("thk,shk->hts", q, k) / math.sqrt(4)
    largest = [max(logits[h, t, s].item() for t in range(5) for s in range(t + 1)) for h in range(HEADS)]
    assert clip.max_logits()[0] == pytest.approx(largest, rel=1e-12)


def test_query_only_where_keys_are_shared_is_exact():
    module = attention(n_kv_heads=2)
    quiet(module, 1)
    clip = QKClip(module, TAU, QKClipConfig(shared_keys="query"))
    before = run(clip, module, rope_dim=4)
    keys, queries = module.wk.weight.detach().clone(), rows(module.wq.weight)
    clip.clip()
    after = run(clip, module, rope_dim=4)
    assert [after[h] for h in (0, 2, 3)] == pytest.approx([TAU] * 3, rel=1e-12)
    assert after[1] == before[1]
    assert torch.equal(module.wk.weight, keys)
    assert torch.equal(rows(module.wq.weight)[1], queries[1])


def test_group_clips_by_its_largest_head():
    module = attention(n_kv_heads=2)
    clip = QKClip(module, TAU, QKClipConfig(shared_keys="group"))
    before = run(clip, module, rope_dim=4)
    values = module.wv.weight.detach().clone()
    clip.clip()
    after = run(clip, module, rope_dim=4)
    for group in ((0, 1), (2, 3)):
        top = max(before[h] for h in group)
        assert [after[h] for h in group] == pytest.approx([TAU * before[h] / top for h in group], rel=1e-12)
    assert min(after) < 0.95 * TAU
    assert torch.equal(module.wv.weight, values)


def test_quiet_group_keeps_every_bit():
    module = attention(n_kv_heads=2)
    quiet(module, 0)
    quiet(module, 1)
    clip = QKClip(module, TAU)
    run(clip, module, rope_dim=4)
    queries, keys = rows(module.wq.weight), module.wk.weight.detach().clone()
    clip.clip()
    assert torch.equal(rows(module.wq.weight)[:2], queries[:2])
    assert torch.equal(module.wk.weight[:4], keys[:4])
    assert not torch.equal(module.wk.weight[4:], keys[4:])


@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_latent_heads_come_to_the_threshold_without_the_shared_key(alpha: float):
    module = latent()
    quiet(module, 3)
    clip = QKClip(module, TAU, QKClipConfig(alpha=alpha))
    before = run(clip, module, rope_dim=2)
    assert max(before) > 1000
    assert before[3] < TAU
    old = {name: p.detach().clone() for name, p in module.named_parameters()}
    clip.clip()
    after = run(clip, module, rope_dim=2)
    assert after[:3] == pytest.approx([TAU] * 3, rel=1e-12)
    assert after[3] == before[3]
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, old[name])}
    assert changed == {"wq.weight", "wkv_up.weight"}
    values = rows(module.wkv_up.weight)[:, 4:]
    assert torch.equal(values, rows(old["wkv_up.weight"])[:, 4:])
    assert torch.equal(rows(module.wkv_up.weight)[3], rows(old["wkv_up.weight"])[3])
    assert torch.equal(rows(module.wq.weight)[3], rows(old["wq.weight"])[3])


def test_the_square_root_on_rotated_queries_would_miss_the_threshold():
    """The shared key cannot take the other half of gamma: what the exact rule is for."""
    module = latent()
    clip = QKClip(module, TAU)
    before = run(clip, module, rope_dim=2)
    clip.clip()
    with torch.no_grad():
        for head, largest in enumerate(before):
            module.wq.weight.unflatten(0, (HEADS, -1))[head, 4:] *= math.sqrt(largest / TAU)
    assert max(run(clip, module, rope_dim=2)) > 4 * TAU


def test_overflown_logits_do_not_erase_a_head():
    module = attention()
    clip = QKClip(module, TAU)
    clip.records[0].copy_(torch.tensor([torch.inf, torch.nan, 1.0, 10.0]))
    old = rows(module.wq.weight)
    clip.clip()
    assert torch.equal(rows(module.wq.weight)[:3], old[:3])
    assert not torch.equal(rows(module.wq.weight)[3], old[3])


def test_nothing_is_recorded_outside():
    module = attention()
    clip = QKClip(module, TAU)
    run(clip, module, rope_dim=4)
    assert module.max_logits is None


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_qk_norm_is_refused(name: str):
    module = nn.Sequential(attention())
    setattr(module[0], name, nn.Identity())
    with pytest.raises(ValueError, match=r"QK-norm \(in 0\) divides.*set model.inner.qk to none"):
        QKClip(module, TAU)


def test_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="there are none"):
        QKClip(nn.Linear(2, 2), TAU)


@pytest.mark.untyped
@pytest.mark.parametrize(
    "wrong", [{"threshold": 0.0}, {"threshold": math.nan}, {"alpha": 1.5}, {"shared_keys": "grup"}]
)
def test_impossible_options(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QKClipConfig(**wrong)  # pyright: ignore[reportArgumentType]
