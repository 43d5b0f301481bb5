"""What an inspection found, in a few sentences."""

from collections import Counter
from collections.abc import Callable, Sequence

from normstream.inspect.inspection import Growth, IdentityRow, Inspection, LayerRow
from normstream.inspect.paths import short_name
from normstream.inspect.report.wiring import normed_streams, ranges
from normstream.lab.style import join_words, short

FP16_MAX = 65504
EXACT = 1e-4
"""Relative errors of the residual identity below this, or below twice that of the true updates, are rounding."""
NOT_SHOWN = 0.01
"""With larger relative errors of the true updates nothing can be said about what is added."""


def headline(inspection: Inspection) -> str:
    """What the model is, in one line."""
    model = inspection.model
    names = join_words(list(inspection.placement))
    words = list(dict.fromkeys(inspection.placement.values()))
    if len(words) == 1:
        placement = words[0] + (f" ({names})" if len(inspection.placement) > 1 else "")
    else:
        placement = ", ".join(f"{stack} {words}" for stack, words in inspection.placement.items())
    layers = "1 layer" if model.n_layers == 1 else f"{model.n_layers} layers"
    return f"{short_name(model.source)}: {placement}; {layers} of width {model.dim}"


def summary(inspection: Inspection) -> str:
    """How the model was looked at, in one line."""
    model = inspection.model
    weights = "weights from the checkpoint" if model.weights == "checkpoint" else "drawn weights"
    tokens = f"{model.tokens} {'random tokens' if model.text is None else 'tokens of text'}"
    loss = "" if inspection.loss is None else f", loss {inspection.loss:.3f} nats a token"
    return f"{model.parameters:,} parameters, {weights}, {model.dtype}, {tokens}{loss}."


def findings(inspection: Inspection) -> list[str]:
    """Sentences on sizes, head-room, what is really added, massive activations, influence and attention logits."""
    makers: tuple[Callable[[Inspection], list[str]], ...] = (
        _weights,
        _identity,
        _growth,
        _headroom,
        _massive,
        _influence,
        _logits,
        _streams,
        _unplaced,
    )
    return [sentence for maker in makers for sentence in maker(inspection)]


def _weights(inspection: Inspection) -> list[str]:
    if inspection.model.weights == "checkpoint":
        return []
    return ["The weights are drawn, not trained: the wiring is the model's, the numbers are those of a random model."]


def _identity(inspection: Inspection) -> list[str]:
    """Whether what the modules return is what is added; nothing where the stream is not finite, a note says that.

    Statistics of the sublayers are there only if the updates explain the stream within rounding.
    """
    rows = [row for row in inspection.identity if row.true == row.true and row.naive == row.naive]
    is_explained = bool(inspection.sublayers)
    if not rows or (not is_explained and len(rows) < len(inspection.identity)):
        return []
    unsure = max(rows, key=lambda row: row.true)
    worst, true = max(rows, key=lambda row: row.naive), unsure.true
    if true > NOT_SHOWN or not is_explained:
        reason = (
            f"rounding in {inspection.model.dtype} hides it" if is_explained else "the wiring is not fully understood"
        )
        return [
            "What is really added to the stream could not be shown: the updates that were found leave a relative "
            f"error of {short(true)} ({_place(inspection, unsure)}); {reason}."
        ]
    if worst.naive <= max(EXACT, 2 * true):
        return [
            f"What attention and feed-forward return is what is added to the stream (relative error {short(true)})."
        ]
    return [
        "What attention and feed-forward return is not what is added to the stream: a tool that takes it is wrong by "
        f"up to {100 * worst.naive:.0f} % ({_place(inspection, worst)}). What is really added sums up to the stream "
        f"within {short(true)}."
    ]


def _place(inspection: Inspection, row: IdentityRow) -> str:
    return f"layer {row.layer}" + (f" of the {row.stack}" if len(inspection.placement) > 1 else "")


POOR_FIT = 0.15
LAWS = {"constant": "{0}", "linear": "{0} {1} l", "exponential": "{0} exp({1} l)"}


def _growth(inspection: Inspection) -> list[str]:
    sentences, normed = [], normed_streams(inspection.wiring)
    for law in inspection.growth:
        if not law.sizes:
            continue
        words = law_words(law)
        grows = f"from {short(law.sizes[0])} to {short(law.sizes[-1])} over {len(law.sizes) - 1} layers"
        stream = _stream(inspection, law.stack, law.stream)
        behind = ", behind the norm on it," if (law.stack, law.stream) in normed else ""
        sentences.append(f"The RMS of {stream}{behind} goes {grows}; {words}.")
    return sentences


def law_words(law: Growth) -> str:
    """A growth law as text.

    >>> law_words(Growth("main", "x", "linear", (1.0, 0.5), {"linear": 0.02}))
    'its growth is linear, 1 + 0.5 l (error 2 %)'
    """
    error = law.errors[law.law]
    first, *rest = law.coefficients
    sign = ("+ " if rest[0] >= 0 else "- ") if law.law == "linear" else ""
    formula = LAWS[law.law].format(short(first), *(sign + short(abs(rate) if sign else rate) for rate in rest))
    words = "no simple law fits, best" if error > POOR_FIT else "it is" if law.law == "constant" else "its growth is"
    return f"{words} {law.law}, {formula} (error {100 * error:.2g} %)"


def _headroom(inspection: Inspection) -> list[str]:
    rows = [row for row in inspection.sublayers if row.max_abs == row.max_abs]
    if not rows:
        return []
    worst = max(rows, key=lambda row: row.max_abs)
    where = f"behind {worst.name}" + (f" of the {worst.stack}" if len(inspection.placement) > 1 else "")
    where += ", before the norm there" * ((worst.stack, worst.stream) in normed_streams(inspection.wiring))
    room = (
        f"{short(worst.headroom_fp16)} times below fp16's {FP16_MAX:,}"
        if worst.headroom_fp16 >= 1
        else f"above fp16's {FP16_MAX:,}, where it overflows"
    )
    sentences = [f"The largest entry of the stream is {short(worst.max_abs)}, {where}: {room}."]
    lost = max(rows, key=lambda row: row.lost_in_bf16)
    if lost.lost_in_bf16 >= 0.01:
        sentences.append(
            f"In bfloat16 {100 * lost.lost_in_bf16:.0f} % of the entries of {lost.name}'s update would change nothing: "
            "they are below half a step of the stream."
        )
    return sentences


def _massive(inspection: Inspection) -> list[str]:
    rows = inspection.massive
    if not inspection.sublayers:
        return []
    if not rows:
        return ["No massive activations (above 100 and 1,000 times the median)."]
    largest = max(rows, key=lambda row: abs(row.value))
    tokens, channels = {row.token for row in rows}, {row.channel for row in rows}
    text = f" ({largest.text!r})" if largest.text else ""
    few = [f"{len(tokens)} token{'s' * (len(tokens) > 1)}", f"{len(channels)} channel{'s' * (len(channels) > 1)}"]
    layers = ranges(sorted({row.layer for row in rows}))
    return [
        f"Massive activations in {join_words(few)}, layers {layers}; the largest is {short(largest.value)}, "
        f"{short(largest.ratio)} times the median, in layer {largest.layer}, token {largest.token}{text}, "
        f"channel {largest.channel}."
    ]


def _influence(inspection: Inspection) -> list[str]:
    """The layers that turn the stream least, for every stack that has more than three."""
    sentences = []
    for stack, n in Counter(row.stack for row in inspection.layers).items():
        rows = sorted((row for row in inspection.layers if row.stack == stack), key=lambda row: row.influence)
        if n <= 3 or not rows[0].influence < rows[-1].influence:
            continue
        least = rows[: 3 if n > 8 else 1]
        streams = len(rows[-1].influence_by_stream) > 1
        stream = "the streams turn on average" if streams else "the stream turns"
        sentences.append(_least(least, rows[-1], stack if len(inspection.placement) > 1 else "", stream))
    return sentences


def _least(least: Sequence[LayerRow], most: LayerRow, stack: str, stream: str) -> str:
    several = len(least) > 1
    names = join_words([str(row.layer) for row in least])
    of = f" of the {stack}" if stack else ""
    turn = join_words([f"{180 * row.influence:.1f}" for row in least])
    sentence = (
        f"Layer{'s' * several} {names}{of} {'have' if several else 'has'} the least influence: {stream} by "
        f"{turn} degrees there, most by {180 * most.influence:.1f} (layer {most.layer})"
    )
    losses = [row.loss_increase for row in least if row.loss_increase is not None]
    if len(losses) == len(least):
        changes = join_words([f"{loss:+.3f}" for loss in losses])
        sentence += f"; without {'each of them' if several else 'it'} the loss changes by {changes} nats a token"
    return f"{sentence}."


def _logits(inspection: Inspection) -> list[str]:
    if not inspection.heads:
        return []
    top = max(inspection.heads, key=lambda row: max(row.maxima, default=0.0))
    value = max(top.maxima, default=0.0)
    return [f"The largest attention logit is {short(value)}, in head {top.maxima.index(value)} of {top.name}."]


def _streams(inspection: Inspection) -> list[str]:
    if not inspection.ratios:
        return []
    first, last = inspection.ratios[0], inspection.ratios[-1]
    return [
        f"RMS of the first stream over that of the second: {short(first.ratio)} after layer {first.layer}, "
        f"{short(last.ratio)} after layer {last.layer}."
    ]


def _unplaced(inspection: Inspection) -> list[str]:
    anatomy = inspection.anatomy
    if anatomy is None:
        return []
    sentences = []
    unknown = sum(site.place == "unknown" for site in anatomy.norms)
    if unknown:
        sentences.append(f"The place of {unknown} of {len(anatomy.norms)} norms could not be shown.")
    return sentences


def _stream(inspection: Inspection, stack: str, stream: str) -> str:
    """A stream by name, where there is more than one.

    The only one is just "the stream".
    """
    several = len({law.stream for law in inspection.growth}) > 1
    words = f"stream {stream}" if several else "the stream"
    return f"{words} of the {stack}" if len(inspection.placement) > 1 else words
