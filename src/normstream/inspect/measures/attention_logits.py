"""The largest attention logit of each head: of what a softmax over keys is given, whoever computes it.

Two places are watched, and no module is known by name: ``softmax`` below autograd, and calls of torch's
``scaled_dot_product_attention``, whose scores are made once more from its arguments. Which mixer they belong to is a
matter of order: to the first sublayer of the running layer whose output comes next.

Shape suffixes: B batch, T queries, S keys, H heads, G key-value heads, K width of a query.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normstream.inspect.anatomy import Anatomy, Call
from normstream.inspect.hooks import tensors_in
from normstream.inspect.inspection import HeadRow
from normstream.inspect.measures.layer_borders import OWN_STACK, check_model, hooked, own_sublayers
from normstream.layers.scores import masked, repeat_heads
from normstream.norms import precise_dtype

SOFTMAXES = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
MASKED = -1e4
"""Scores of masked pairs are below this: minus infinity, or the lowest number of a dtype."""
ATTENTION_KINDS = ("mixer", "cross", "parallel")


@dataclass(frozen=True)
class Site:
    """A sublayer, and where its output is seen."""

    stack: str
    name: str
    layer: int
    kind: str
    layer_call: Call
    output: Call


@torch.no_grad()
def attention_maxima(
    model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None
) -> tuple[tuple[HeadRow, ...], tuple[str, ...]]:
    """The maxima of every mixer and cross-attention, after scaling, cap, position bias and mask, for one sequence.

    Several softmaxes of one mixer give their heads one after another. Notes tell which mixers have no row: those
    without a softmax over keys, those with more keys than tokens (attention sinks), and those that shift their scores
    to a maximum of zero before the softmax.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=1, n_heads=2)).eval()
    >>> _ = nn.init.zeros_(model.layers[0].attention.wq.weight)
    >>> attention_maxima(model, {"tokens_BT": torch.tensor([[1, 2, 3]])}, None)[0][0].maxima
    (0.0, 0.0)
    """
    check_model(model, anatomy)
    sites = _own_sites(model) if anatomy is None else _sites(anatomy)
    watch = _Watch(model, sites)
    with hooked(watch.hooks()), _Softmaxes(watch.see), _FusedAttention(watch.see_fused, watch):
        model(**inputs)
    rows, notes = [], {}
    for site in (site for site in sites if site.kind in ATTENTION_KINDS):
        maxima = watch.found.get(site, [])
        problem = _problem(site, maxima)
        if problem is None:
            rows.append(HeadRow(site.stack, site.name, site.layer, tuple(v for seen in maxima for v in seen.values)))
        else:
            notes.setdefault(problem, []).append(site.name)
    return tuple(rows), tuple(f"no attention logits, {problem}: {', '.join(names)}" for problem, names in notes.items())


@dataclass(frozen=True)
class Scores:
    """What one softmax was given."""

    values: tuple[float, ...]
    """The largest of each head."""
    n_queries: int
    n_keys: int
    is_shifted: bool
    """Whether the largest of every single query is zero, although others are not: a maximum was subtracted."""


def maxima_of(scores: Tensor, lengths: set[int]) -> Scores | None:
    """The largest score of each head; axes (..., T, S), all leading ones are heads. None unless T is a known length.

    >>> maxima_of(torch.tensor([[[[1.0, 2.0], [0.0, -1.0]]]]), lengths={2}).values
    (2.0,)
    """
    if scores.ndim < 3 or scores.shape[-2] not in lengths:
        return None
    heads = scores.flatten(0, -3).float()
    rows = heads.amax(-1)
    is_shifted = not bool(rows.any()) and bool(((heads != 0) & (heads > MASKED)).any())
    n_queries, n_keys = scores.shape[-2:]
    return Scores(tuple(rows.amax(-1).tolist()), n_queries, n_keys, is_shifted)


def fused_scores(
    query_BHTK: Tensor,
    key_BGSK: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The scores (B, H, T, S) that ``scaled_dot_product_attention`` with these arguments gives to its softmax.

    >>> one = torch.ones(1, 1, 2, 4)
    >>> fused_scores(one, one, one, is_causal=True)[0, 0].tolist()
    [[2.0, -inf], [2.0, 2.0]]
    """
    high = precise_dtype(query_BHTK)
    keys = repeat_heads(key_BGSK, query_BHTK.shape[1]) if enable_gqa else key_BGSK
    factor = query_BHTK.shape[-1] ** -0.5 if scale is None else scale
    return masked(query_BHTK.to(high) @ keys.to(high).mT * factor, attn_mask, causal=is_causal)


def _problem(site: Site, seen: list[Scores]) -> str | None:
    if not seen:
        return "no softmax over keys was seen"
    if site.kind != "cross" and any(scores.n_keys != scores.n_queries for scores in seen):
        return "the softmax has more or fewer entries than there are tokens (sinks, or a memory)"
    if any(scores.is_shifted for scores in seen):
        return "the scores are shifted before the softmax"
    return None


def _sites(anatomy: Anatomy) -> tuple[Site, ...]:
    return tuple(
        Site(stack.name, sublayer.name, sublayer.layer, sublayer.kind, layer.call, sublayer.output)
        for stack in anatomy.stacks
        for layer in stack.layers
        for sublayer in layer.sublayers
    )


def _own_sites(model: Any) -> tuple[Site, ...]:
    return tuple(
        Site(OWN_STACK, own.name, own.layer, own.kind, Call(f"layers.{own.layer}"), Call(own.path))
        for own in own_sublayers(model)
    )


class _Watch:
    """Collects scores while a model runs, and hands them to the sublayer that ends next."""

    def __init__(self, model: nn.Module, sites: tuple[Site, ...]) -> None:
        self.model = model
        self.sites = {site.output: site for site in sites}
        self.layers = {site.layer_call.path for site in sites}
        self.calls: Counter[str] = Counter()
        self.lengths: set[int] = set()
        self.waiting: list[Scores] = []
        self.found: dict[Site, list[Scores]] = {}
        self.inside_fused = False

    def hooks(self) -> Iterator[Callable[[], Any]]:
        for path in self.layers:
            module = self.model.get_submodule(path)
            yield lambda m=module: m.register_forward_pre_hook(self._enter, with_kwargs=True)
        for path in {call.path for call in self.sites}:
            module = self.model.get_submodule(path)
            yield lambda m=module, p=path: m.register_forward_hook(self._leave(p))

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = next(tensors_in((args, kwargs)), None)
        self.lengths = set() if stream is None else {size for size in stream.shape[:-1] if size > 1}
        self.waiting = []

    def _leave(self, path: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            site = self.sites.get(Call(path, self.calls[path]))
            self.calls[path] += 1
            if site is not None:
                self.found[site], self.waiting = self.waiting, []

        return leave

    def see(self, scores: Tensor) -> None:
        if not self.inside_fused and (seen := maxima_of(scores, self.lengths)) is not None:
            self.waiting.append(seen)

    def see_fused(self, *args: Any, **kwargs: Any) -> None:
        self.see(fused_scores(*args, **kwargs))


class _Softmaxes(TorchDispatchMode):
    """Shows what every softmax over the last axis is given."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in SOFTMAXES and args[1] in (-1, args[0].ndim - 1):
            self.see(args[0])
        return func(*args, **(kwargs or {}))


class _FusedAttention(TorchFunctionMode):
    """Shows the arguments of every ``scaled_dot_product_attention``; a softmax inside it is not seen again."""

    def __init__(self, see: Callable[..., None], watch: _Watch) -> None:
        super().__init__()
        self.see, self.watch = see, watch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.see(*args, **kwargs)
        self.watch.inside_fused = True
        try:
            return func(*args, **kwargs)
        finally:
            self.watch.inside_fused = False
