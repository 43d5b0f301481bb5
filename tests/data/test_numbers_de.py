"""Generated numbers: the German is checked by a small speller of numbers written here, not by num2words."""

import re
import sys
from datetime import date

import pytest

from normstream.data.numbers_de import MONTHS_DE, MONTHS_EN, WEEKDAYS_DE, WEEKDAYS_EN, number_pairs
from normstream.data.translation import TranslationConfig, load_translation

pytest.importorskip("num2words")

SMALL = [
    "null",
    "eins",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
    "dreizehn",
    "vierzehn",
    "fünfzehn",
    "sechzehn",
    "siebzehn",
    "achtzehn",
    "neunzehn",
]
TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
UNITS_EN = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS_EN = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def german(n: int, one: str = "eins") -> str:
    """A number below a million in words; ``one`` is how 1 is spelt at the end."""
    if n >= 1000:
        return german(n // 1000, "ein") + "tausend" + (german(n % 1000, one) if n % 1000 else "")
    if n >= 100:
        return german(n // 100, "ein") + "hundert" + (german(n % 100, one) if n % 100 else "")
    if n < 20:
        return one if n == 1 else SMALL[n]
    return (german(n % 10, "ein") + "und" if n % 10 else "") + TENS[n // 10 - 2]


def value(words: str) -> int:
    """The number that English words spell."""
    total = part = 0
    for word in re.findall(r"[a-z]+", words):
        if word == "hundred":
            part *= 100
        elif word == "thousand":
            total, part = total + 1000 * part, 0
        elif word != "and":
            part += UNITS_EN.index(word) if word in UNITS_EN else 10 * (TENS_EN.index(word) + 2)
    return total + part


def english(n: int) -> str:
    """A number below a million in words, as in one thousand, two hundred and thirty-four."""
    if n >= 1000:
        rest = n % 1000
        between = "" if not rest else " and " if rest < 100 else ", "
        return f"{english(n // 1000)} thousand{between}{english(rest) if rest else ''}"
    if n >= 100:
        return f"{UNITS_EN[n // 100]} hundred" + (f" and {english(n % 100)}" if n % 100 else "")
    if n < 20:
        return UNITS_EN[n]
    return TENS_EN[n // 10 - 2] + (f"-{UNITS_EN[n % 10]}" if n % 10 else "")


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    return number_pairs(2000)


def test_cardinals() -> None:
    """Every number of up to three digits is likely enough to come up; of the others enough do."""
    words = set(UNITS_EN + TENS_EN) | {"hundred", "thousand", "and"}
    known = {
        source: target for source, target in number_pairs(20_000) if words.issuperset(re.findall(r"[a-z]+", source))
    }
    cardinals = {value(source): target for source, target in known.items() if english(value(source)) == source}
    assert len(cardinals) > 2000
    assert set(range(100)) < cardinals.keys()
    assert {n: target for n, target in cardinals.items() if target != german(n)} == {}
    assert any(n // 1000 % 100 == 1 and n > 100_000 for n in cardinals)  # einhunderteintausend


def test_times(pairs: list[tuple[str, str]]) -> None:
    """Hour and minute are read from the English; half past seven is half of the eighth hour."""
    parts = {"at night": "nachts", "in the morning": "morgens", "in the afternoon": "nachmittags"}
    parts["in the evening"] = "abends"
    found = [pair for pair in pairs if pair[0].endswith(tuple(parts))]
    assert len(found) > 100
    kinds = set()
    for english, translation in found:
        part = next(part for part in parts if english.endswith(part))
        words = english.removesuffix(f" {part}").split()
        kinds.add(words[0] if words[0] == "half" else words[1] if words[1] in ("o'clock", "oh") else "plain")
        if words[0] == "half":
            expected = f"halb {german(value(words[2]) % 12 + 1)}"
        else:
            minute = "" if words[1] == "o'clock" else " " + german(value(" ".join(words[1:]).removeprefix("oh ")))
            expected = f"{german(value(words[0]), 'ein')} Uhr{minute}"
        assert translation == f"{expected} {parts[part]}"
    assert kinds == {"half", "o'clock", "oh", "plain"}


def test_dates(pairs: list[tuple[str, str]]) -> None:
    """The German names day, month and year; their weekday is the calendar's, and the English names the same."""
    days = {german(day) + ("te" if day < 20 else "ste"): day for day in range(1, 32)}
    days |= {"erste": 1, "dritte": 3, "siebte": 7, "achte": 8}
    years = {german(year): year for year in range(2000, 2100)}
    years |= {
        f"{german(year // 100)}hundert{german(year % 100) if year % 100 else ''}": year for year in range(1900, 2000)
    }
    found = [re.fullmatch(r"(\w+), der (\w+) (\w+) (\w+)", pair[1]) for pair in pairs]
    dates = [(pair[0], match) for pair, match in zip(pairs, found, strict=True) if match]
    assert len(dates) > 300
    for english, match in dates:
        weekday, day, month, year = match.groups()
        when = date(years[year], MONTHS_DE.index(month) + 1, days[day])
        assert WEEKDAYS_DE[when.weekday()] == weekday
        assert english.startswith(f"{WEEKDAYS_EN[when.weekday()]}, {MONTHS_EN[when.month - 1]} ")


def test_prices(pairs: list[tuple[str, str]]) -> None:
    names = {"euro": "Euro", "dollar": "Dollar", "dollars": "Dollar", "pound sterling": "Pfund"}
    names["pounds sterling"] = "Pfund"
    shape = re.compile(rf"([\w -]+?) ({'|'.join(names)}), ([\w-]+) (?:cents?|pence|penny)")
    found = [(match, pair[1]) for pair in pairs if (match := shape.fullmatch(pair[0]))]
    assert len(found) > 300
    for match, translation in found:
        whole, currency, hundredths = match.groups()
        expected = f"{german(value(whole), 'ein')} {names[currency]} und {german(value(hundredths), 'ein')} "
        assert translation.startswith(expected), (match[0], translation)


def test_known_pairs(pairs: list[tuple[str, str]]) -> None:
    known = dict(number_pairs(20_000))
    assert known["twenty-third"] == "dreiundzwanzigste"
    assert known["nineteen eighty-four"] == "neunzehnhundertvierundachtzig"
    assert known["half past seven in the evening"] == "halb acht abends"


def test_the_same_pairs_every_time_and_no_english_twice(pairs: list[tuple[str, str]]) -> None:
    assert number_pairs(2000) == pairs
    assert number_pairs(700) == pairs[:700]
    assert number_pairs(700, seed=1) != pairs[:700]
    assert len({english for english, _ in pairs}) == 2000


def test_splits_share_no_source() -> None:
    data = load_translation(TranslationConfig(n_pairs=1000, validation_fraction=0.2))
    train, validation = ({pair.source for pair in split.pairs} for split in (data.train, data.validation))
    assert len(train) + len(validation) == 1000
    assert 150 < len(validation) < 250
    assert not train & validation
    other = load_translation(TranslationConfig(n_pairs=1000, direction="de-en"))
    swapped = {(pair.target, pair.source) for split in (other.train, other.validation) for pair in split.pairs}
    assert swapped == set(number_pairs(1000))


@pytest.mark.parametrize("n_pairs", [0, 200_001])
def test_number_of_pairs_out_of_range(n_pairs: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 200000 pairs, got n_pairs {n_pairs}"):
        number_pairs(n_pairs)


def test_missing_num2words_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(ImportError, match=r"needs num2words: pip install 'normstream\[translation\]'"):
        load_translation(TranslationConfig())
