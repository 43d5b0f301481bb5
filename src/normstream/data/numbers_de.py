"""The source ``numbers``: English numbers, dates, times and prices in words, and the same in German.

Words are those of num2words (extra [translation]), but for its einhunderteinstausend, which is put right. Each pair is
of one of six kinds, drawn with equal chances; a draw whose English has come up before is thrown away and another one is
made, kind included:

========= ========================================================= =========================================
kind      values                                                    example
========= ========================================================= =========================================
cardinal  1 to 6 digits, each length as likely                      sixty-one, einundsechzig
ordinal   1 to 9,999: 1 to 4 digits, each length as likely          fifty-third, dreiundfünfzigste
year      1100 to 2099                                              nineteen oh-five, neunzehnhundertfünf
date      a day of 1900 to 2099, its weekday in front               see below
time      a minute of the day                                       see below
price     euro, dollars or pounds below 1,000 and 0 to 99 hundredths two euro, one cent, zwei Euro und ein Cent
========= ========================================================= =========================================

A date is "Friday, March twenty-third, nineteen eighty-four" and "Freitag, der dreiundzwanzigste März
neunzehnhundertvierundachtzig". A time is "seven twenty-five in the evening" and "sieben Uhr fünfundzwanzig abends",
"half past seven in the evening" and "halb acht abends". So the order changes within words (twenty-three,
dreiundzwanzig), between words (month and day), and a word may depend on another one (half past seven, halb acht).

There are only 1,000 years and 1,440 times, so in a large set they are rarer than a sixth.
"""

from collections.abc import Callable, Iterator
from datetime import date, timedelta
from functools import lru_cache

import numpy as np

from normstream.data.extras import import_extra

MOST_NUMBERS = 200_000
"""Most pairs that can be asked for."""
MONTHS_DE = (
    *("Januar", "Februar", "März", "April", "Mai", "Juni", "Juli"),
    *("August", "September", "Oktober", "November", "Dezember"),
)
MONTHS_EN = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
WEEKDAYS_DE = ("Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag")
WEEKDAYS_EN = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
CURRENCIES = ("EUR", "USD", "GBP")
FIRST_DAY, N_DAYS = date(1900, 1, 1), 73_049
_DRAWS = 1 << 12


def number_pairs(n_pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """``n_pairs`` pairs (English, German) of which no two have the same English.

    They depend on the seed alone, and of two numbers of pairs the smaller gives the beginning of the larger.

    Raises ValueError for fewer than 1 or more than 200,000 pairs, ImportError without the extra [translation].

    >>> for pair in number_pairs(3):
    ...     print(*pair, sep=" | ")
    fiftieth | fünfzigste
    Wednesday, June tenth, twenty eighty-two | Mittwoch, der zehnte Juni zweitausendzweiundachtzig
    ninety-fifth | fünfundneunzigste
    """
    if not 1 <= n_pairs <= MOST_NUMBERS:
        raise ValueError(f"source numbers makes 1 to {MOST_NUMBERS} pairs, got n_pairs {n_pairs}; change it")
    words = _Words()
    kinds = (words.cardinal, words.ordinal, words.year, words.date, words.time, words.price)
    draw, pairs = _below(seed), {}
    while len(pairs) < n_pairs:
        english, german = kinds[draw(len(kinds))](draw)
        pairs.setdefault(english, german)
    return list(pairs.items())


Draw = Callable[[int], int]


def _below(seed: int) -> Draw:
    """Draws of whole numbers in [0, n): Philox's raw output, which numpy promises to keep, modulo n."""

    def stream() -> Iterator[int]:
        philox = np.random.Philox(np.random.SeedSequence([seed]))
        while True:
            yield from philox.random_raw(_DRAWS).tolist()

    raw = stream()
    return lambda n: next(raw) % n


class _Words:
    """Each kind of pair from draws; both languages."""

    def __init__(self) -> None:
        self._num2words = lru_cache(maxsize=1 << 16)(import_extra("num2words", "translation").num2words)

    def _both(self, number: int | float, kind: str, **options: str) -> tuple[str, str]:
        english, german = (self._num2words(number, lang=lang, to=kind, **options) for lang in ("en", "de"))
        return english, german

    def cardinal(self, draw: Draw) -> tuple[str, str]:
        english, german = self._both(draw(10 ** (1 + draw(6))), "cardinal")
        return english, german.replace("einstausend", "eintausend")

    def ordinal(self, draw: Draw) -> tuple[str, str]:
        return self._both(1 + draw(10 ** (1 + draw(4)) - 1), "ordinal")

    def year(self, draw: Draw) -> tuple[str, str]:
        return self._both(1100 + draw(1000), "year")

    def date(self, draw: Draw) -> tuple[str, str]:
        day = FIRST_DAY + timedelta(draw(N_DAYS))
        (day_en, day_de), (year_en, year_de) = self._both(day.day, "ordinal"), self._both(day.year, "year")
        weekday, month = day.weekday(), day.month - 1
        return (
            f"{WEEKDAYS_EN[weekday]}, {MONTHS_EN[month]} {day_en}, {year_en}",
            f"{WEEKDAYS_DE[weekday]}, der {day_de} {MONTHS_DE[month]} {year_de}",
        )

    def time(self, draw: Draw) -> tuple[str, str]:
        hour, minute = divmod(draw(24 * 60), 60)
        part_en, part_de = _part_of_day(hour)
        (hour_en, hour_de), (minute_en, minute_de) = (
            self._both(number, "cardinal") for number in ((hour - 1) % 12 + 1, minute)
        )
        if minute == 30:
            return f"half past {hour_en} {part_en}", f"halb {self._both(hour % 12 + 1, 'cardinal')[1]} {part_de}"
        hour_de = f"{'ein' if hour_de == 'eins' else hour_de} Uhr"
        if minute == 0:
            return f"{hour_en} o'clock {part_en}", f"{hour_de} {part_de}"
        minute_en = f"oh {minute_en}" if minute < 10 else minute_en
        return f"{hour_en} {minute_en} {part_en}", f"{hour_de} {minute_de} {part_de}"

    def price(self, draw: Draw) -> tuple[str, str]:
        currency, hundredths = CURRENCIES[draw(len(CURRENCIES))], draw(100_000)
        return self._both(hundredths / 100, "currency", currency=currency)


def _part_of_day(hour: int) -> tuple[str, str]:
    for end, english, german in (
        (5, "at night", "nachts"),
        (12, "in the morning", "morgens"),
        (18, "in the afternoon", "nachmittags"),
        (22, "in the evening", "abends"),
    ):
        if hour < end:
            return english, german
    return "at night", "nachts"
