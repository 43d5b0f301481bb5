"""The placement of a stack's norms in a word or two: pre, post, sandwich, reordered; and how layers differ."""

from collections import Counter
from collections.abc import Iterable

from normstream.inspect.anatomy import StackAnatomy, Sublayer

FORMS = {
    (True, False, False): "pre",
    (True, True, False): "sandwich",
    (False, True, False): "reordered",
    (False, False, True): "post",
    (True, False, True): "pre and post",
    (False, True, True): "post with output norm",
    (True, True, True): "sandwich and post",
    (False, False, False): "no norm",
}
"""By whether a sublayer has a norm before it, one on its output, one on the stream behind it."""
FEW = 2
"""So many sublayers that differ from all others are named one by one."""


def placement_name(stack: StackAnatomy) -> str:
    """What the documentation calls the wiring of a stack.

    One word where all sublayers are wired alike, else the word for each kind of sublayer or for each range of layers:
    ``pre``, ``pre, parallel with one norm``, ``hybrid: mixer pre, ffn post``, ``hybrid: layers 0-3 post, layers 4-11
    pre``, ``pre, but layers.0.mixer no norm``.
    """
    standing = _standing(stack)
    forms = {sublayer.name: _form(sublayer, standing) for sublayer in stack.sublayers}
    if not forms:
        return "no sublayers"
    extras = ", ".join(_extras(stack))
    return _words(stack, forms) + (f", {extras}" if extras else "")


def _standing(stack: StackAnatomy) -> set[str]:
    """Sublayers with a norm on the stream behind them. Behind the last one, the final norm may be that norm."""
    names = {name for norm in stack.norms if norm.place == "trunk" for name in norm.sublayers}
    has_final = any(norm.place == "final" for norm in stack.norms)
    rest = {sublayer.name for sublayer in stack.sublayers} - names
    return names | rest if has_final and rest == {stack.sublayers[-1].name} else names


def _form(sublayer: Sublayer, standing: set[str]) -> str:
    return FORMS[sublayer.pre_norm is not None, sublayer.output_norm is not None, sublayer.name in standing]


def _words(stack: StackAnatomy, forms: dict[str, str]) -> str:
    counted = Counter(forms.values()).most_common()
    usual, number = counted[0]
    if len(counted) == 1:
        return usual
    exceptions = [f"{name} {form}" for name, form in forms.items() if form != usual]
    if number > len(exceptions) and len(exceptions) <= FEW:
        return f"{usual}, but {', '.join(exceptions)}"
    by_part: dict[str, set[str]] = {}
    for name, form in forms.items():
        by_part.setdefault(name.split(".")[-1], set()).add(form)
    if all(len(found) == 1 for found in by_part.values()):
        return "hybrid: " + ", ".join(f"{part} {form}" for part, (form,) in by_part.items())
    return "hybrid: " + ", ".join(_by_range(stack, forms))


def _by_range(stack: StackAnatomy, forms: dict[str, str]) -> Iterable[str]:
    """Neighbouring layers that are wired alike, together."""
    ranges: list[tuple[str, int, int]] = []
    for layer in stack.layers:
        words = " + ".join(dict.fromkeys(forms[sublayer.name] for sublayer in layer.sublayers)) or "no sublayers"
        if ranges and ranges[-1][0] == words:
            ranges[-1] = words, ranges[-1][1], layer.index
        else:
            ranges.append((words, layer.index, layer.index))
    for words, first, last in ranges:
        yield f"layer {first} {words}" if first == last else f"layers {first}-{last} {words}"


def _extras(stack: StackAnatomy) -> Iterable[str]:
    if stack.is_parallel:
        pre = {sublayer.name: sublayer.pre_norm for sublayer in stack.sublayers}
        pairs = [(s.name, other) for s in stack.sublayers for other in s.parallel_to]
        yield "parallel with one norm" if all(pre[a] and pre[a] == pre[b] for a, b in pairs) else "parallel"
    if any(abs(sublayer.skip - 1) > 1e-3 for sublayer in stack.sublayers):
        yield "scaled skip"
