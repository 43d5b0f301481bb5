"""Generated pairs of sentences: do both say the same? Deterministic, balanced, and learnt in half a minute.

A sentence says who does what to which thing: each is one of six meanings, and each meaning has two words. The first
sentence of a pair is ``WHO VERB THING``, the second ``THING WHO VERB``, with words drawn anew. In half of the pairs the
second sentence has the meanings of the first, in the other half all three are others. So one has to find which words of
the two sentences belong together and know which words mean the same.
"""

import random

from normstream.data.labelled_files import Example

WHO = (
    *(("doctor", "medic"), ("kid", "child"), ("boss", "chief")),
    *(("thief", "robber"), ("sailor", "mariner"), ("guest", "visitor")),
)
"""Six meanings of two words each."""
VERB = (
    *(("buys", "purchases"), ("sees", "spots"), ("fixes", "repairs")),
    *(("likes", "enjoys"), ("takes", "grabs"), ("hides", "conceals")),
)
"""Six meanings of two words each."""
THING = (
    *(("car", "auto"), ("house", "home"), ("stone", "rock")),
    *(("sofa", "couch"), ("gift", "present"), ("picture", "image")),
)
"""Six meanings of two words each."""

SLOTS = (WHO, VERB, THING)


def paraphrases(n_pairs: int, seed: int = 0) -> list[Example]:
    """Pairs with label 1 where both sentences say the same and 0 where they do not; the same for the same seed.

    >>> for example in paraphrases(2, seed=2):
    ...     print(example.label, example.text, "|", example.pair)
    0 doctor buys stone | image chief enjoys
    1 sailor repairs auto | auto mariner repairs
    """
    draw = random.Random(seed)
    return [_pair(draw) for _ in range(n_pairs)]


def _pair(draw: random.Random) -> Example:
    label, first = draw.randrange(2), [draw.randrange(len(slot)) for slot in SLOTS]
    second = first
    if label == 0:
        second = [(n + draw.randrange(1, len(slot))) % len(slot) for n, slot in zip(first, SLOTS, strict=True)]
    (who, verb, thing), (other_who, other_verb, other_thing) = (
        [slot[n][draw.randrange(2)] for n, slot in zip(meanings, SLOTS, strict=True)] for meanings in (first, second)
    )
    return Example(str(label), f"{who} {verb} {thing}", f"{other_thing} {other_who} {other_verb}")
