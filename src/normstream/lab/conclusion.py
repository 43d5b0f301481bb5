"""The conclusion of a comparison in words, every one of them decided by the numbers."""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from normstream.lab.matrix import has_many, matrix
from normstream.lab.scores import with_spread
from normstream.lab.style import FAMILIAR, join_words, label, number, ordinal, rate
from normstream.lab.summary import spread, table
from normstream.lab.words import collapse_meaning, measured, task_of

Run = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """Final validation losses of one placement at one learning rate, by seed; a loss that is not finite is infinite."""

    placement: str
    lr: float
    losses: dict[int, float]

    @property
    def label(self) -> str:
        return label(self.placement)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses.values())

    @property
    def std(self) -> float | None:
        return spread(list(self.losses.values())) if math.isfinite(self.mean) else None

    def describe(self) -> str:
        if not math.isfinite(self.mean):
            return f"{self.label} without a finite loss in every seed"
        return f"{self.label} {self.loss}"

    @property
    def loss(self) -> str:
        """The mean loss with its spread, where one is known."""
        return number(self.mean) + ("" if self.std is None else f" \u00b1 {number(self.std)}")


@dataclass(frozen=True)
class Lead:
    """How far `first` is below `second`, both over the same seeds."""

    first: Cell
    second: Cell

    @property
    def gap(self) -> float:
        return self.second.mean - self.first.mean

    @property
    def spread(self) -> float | None:
        """The larger of the two standard deviations over seeds."""
        return max((cell.std for cell in (self.first, self.second) if cell.std is not None), default=None)

    @property
    def within_spread(self) -> bool:
        return self.spread is not None and self.gap < self.spread

    @property
    def n_seeds(self) -> int:
        return len(self.first.losses)

    @property
    def wins(self) -> str:
        lower = sum(self.first.losses[seed] < self.second.losses[seed] for seed in self.first.losses)
        return f"in {lower} of {count(self.n_seeds, 'seed')}"


def conclusion(summary: dict[str, Any]) -> str:
    """Say in a short paragraph what the numbers of a summary show, and what they do not.

    >>> run = {"status": "finished", "lr": 0.01, "seed": 0, "diverged": False, "collapsed": False}
    >>> runs = [run | {"placement": "pre", "val_loss": 2.0}, run | {"placement": "post", "val_loss": 2.5}]
    >>> conclusion({"task": "lm", "runs": runs})[:93]
    'In one seed, Pre-Norm has the lowest validation loss: 2.000 at learning rate 0.01, against 2.'
    """
    return " ".join(sentences(summary))


def sentences(summary: dict[str, Any]) -> list[str]:
    """Return the conclusion sentence by sentence; the first is the headline."""
    cells = finished_cells(summary["runs"])
    if has_many(summary):
        return of_many(cells, summary)
    said = headline(cells, summary)
    if len({cell.lr for cell in cells}) > 1 or len({cell.placement for cell in cells}) > 2:
        for lr in sorted({cell.lr for cell in cells}):
            said += ranking([cell for cell in cells if cell.lr == lr])
    return said + metric(summary) + breakdowns(summary) + missing(summary["runs"])


def finished_cells(runs: list[Run]) -> list[Cell]:
    """Group the finished runs by placement and learning rate."""
    losses: dict[tuple[str, float], dict[int, float]] = {}
    for run in finished(runs):
        loss = math.inf if run["val_loss"] is None else run["val_loss"]
        losses.setdefault((run["placement"], run["lr"]), {})[run["seed"]] = loss
    return [Cell(placement, lr, by_seed) for (placement, lr), by_seed in losses.items()]


def fair(cells: list[Cell]) -> list[Cell]:
    """Keep only the seeds that all cells have and sort by mean loss; empty when they share no seed."""
    seeds = sorted(set.intersection(*(set(cell.losses) for cell in cells))) if cells else []
    kept = [Cell(cell.placement, cell.lr, {seed: cell.losses[seed] for seed in seeds}) for cell in cells if seeds]
    return sorted(kept, key=lambda cell: cell.mean)


def headline(cells: list[Cell], summary: dict[str, Any]) -> list[str]:
    """Compare the placements, each at its own best learning rate: the headline and the evidence for it."""
    runs = summary["runs"]
    if not cells:
        return ["No run has finished yet."]
    best: dict[str, Cell] = {}
    for cell in fair(cells) or sorted(cells, key=lambda cell: cell.mean):
        best.setdefault(cell.placement, cell)
    ranked = fair(list(best.values()))
    if not ranked:
        return ["The placements share no finished seed yet, so they cannot be compared."]
    if not math.isfinite(ranked[0].mean):
        return ["No placement kept a finite loss in every seed, so none can be called better."]
    if all(run["diverged"] or run["collapsed"] for run in finished(runs)):
        return [f"No placement learned more than {task_of(summary).baseline}, so none can be called better."]
    if len(ranked) == 1:
        only = ranked[0]
        where = f"validation loss {number(only.mean)} at learning rate {rate(only.lr)}"
        return [f"Only {only.label} has finished runs: {where}."]
    lead = Lead(ranked[0], ranked[1])
    several_rates = len({run["lr"] for run in runs}) > 1
    return [opening(lead, several_rates, partial=len(finished(runs)) < len(runs)), evidence(lead, several_rates)]


def opening(lead: Lead, several_rates: bool, partial: bool) -> str:
    """Name the winner, or say that there is none."""
    first, second = lead.first, lead.second
    at_first = f"{number(first.mean)} at learning rate {rate(first.lr)}"
    if not math.isfinite(second.mean):
        said = f"{first.label} alone keeps a finite loss in every seed: validation loss {at_first}."
    elif lead.gap == 0:
        said = f"No clear winner: {first.label} and {second.label} both reach {number(first.mean)}."
    elif lead.within_spread:
        said = f"No clear winner: {first.label} ({at_first}) leads {second.label} by less than the spread over seeds."
    else:
        at_second = f"{number(second.mean)} for {second.label}" + (f" at {rate(second.lr)}" if several_rates else "")
        said = f"{first.label} learns best: validation loss {at_first}, against {at_second}."
        if lead.n_seeds == 1:
            said = f"In one seed, {first.label} has the lowest validation loss: {at_first}, against {at_second}."
    if not partial:
        return said
    return "So far: " + (said[0].lower() + said[1:] if said.startswith(("No ", "In ")) else said)


def evidence(lead: Lead, several_rates: bool) -> str:
    """Say how large the lead is, in how many seeds it holds and whether it exceeds the spread."""
    scope = "Each at its best learning rate, " if several_rates else ""
    if not math.isfinite(lead.gap):
        return f"{scope}{lead.first.label} is lower than {lead.second.label} {lead.wins}."
    said = f"{scope}{lead.first.label} leads {lead.second.label} by {number(lead.gap)}"
    if lead.n_seeds == 1:
        return f"{said}; one seed: no spread known."
    larger = "not larger" if lead.within_spread else "larger"
    return (
        f"{said} on average over {count(lead.n_seeds, 'seed')}; it is lower {lead.wins}, and the lead is {larger} than "
        f"the spread over seeds (standard deviation {number(lead.spread)})."
    )


def ranking(cells: list[Cell]) -> list[str]:
    """Rank the placements at one learning rate."""
    ranked = fair(cells)
    if not ranked:
        return [f"At learning rate {rate(cells[0].lr)} no seed is finished by every placement."]
    said = f"At learning rate {rate(ranked[0].lr)}: {', '.join(cell.describe() for cell in ranked)}"
    lead = Lead(*ranked[:2]) if len(ranked) > 1 else None
    if lead is None or lead.n_seeds == 1 or not math.isfinite(lead.gap):
        return [f"{said}."]
    larger = "not larger" if lead.within_spread else "larger"
    return [f"{said} (lead {number(lead.gap)} {lead.wins}, {larger} than the spread)."]


def metric(summary: dict[str, Any]) -> list[str]:
    """Say how the placements do by the task's first metric, each at the learning rate of its lowest loss."""
    metrics = measured(summary)
    if not metrics:
        return []
    kept: list[tuple[float, dict[str, Any]]] = []
    for row in matrix(summary).rows:
        cells = [cell for cell in row.cells if cell and cell["val_loss_mean"] is not None]
        best = min(cells, key=lambda cell: cell["val_loss_mean"], default=None)
        if best is not None and (value := best["metrics"][metrics[0].name]["mean"]) is not None:
            kept.append((value, best))
    if not kept:
        return []
    kept.sort(key=lambda entry: entry[0], reverse=metrics[0].higher_is_better)
    many = has_many(summary)
    shown = [cell for i, (_, cell) in enumerate(kept) if not many or i < 3 or cell["placement"] in FAMILIAR]
    several = len(summary["lrs"]) > 1
    said = [f"{label(cell['placement'])} {with_spread(cell, metrics[0].name)}" for cell in shown]
    title = metrics[0].title[0].upper() + metrics[0].title[1:]
    order = "higher" if metrics[0].higher_is_better else "lower"
    at = ", each at the learning rate of its lowest loss" if several else ""
    return [f"{title} ({order} is better){at}: {join_words(said)}."]


def breakdowns(summary: dict[str, Any]) -> list[str]:
    """Say who diverged or collapsed, at which learning rate and in how many seeds."""
    runs = finished(summary["runs"])
    if not runs:
        return []
    diverged = broken(runs, "diverged", lambda run: run["diverged"])
    collapses = broken(runs, "collapsed", lambda run: run["collapsed"])
    if collapses:
        collapses[-1] += what_collapsed_means(summary)
    return diverged + collapses or ["No run diverged or collapsed."]


def what_collapsed_means(summary: dict[str, Any]) -> str:
    """Define the word, with the loss that it is about."""
    return f" Collapsed means: {collapse_meaning(task_of(summary))}, {number(summary['data']['baseline_loss'])}."


def broken(runs: list[Run], verb: str, happened: Callable[[Run], bool]) -> list[str]:
    """Return one sentence for each placement to which it happened."""
    said = []
    for placement in unique(run["placement"] for run in runs):
        own = [run for run in runs if run["placement"] == placement]
        places = []
        for lr in sorted({run["lr"] for run in own if happened(run)}):
            here = [run for run in own if run["lr"] == lr]
            places.append(f"at {rate(lr)} in {sum(map(happened, here))} of {count(len(here), 'seed')}")
        if places:
            said.append(f"{label(placement)} {verb} {join_words(places).replace('at ', 'at learning rate ', 1)}.")
    return said


def of_many(cells: list[Cell], summary: dict[str, Any]) -> list[str]:
    """The conclusion when there are too many placements to name each: the best, the familiar, and counts of the rest.

    Learning rates at which a seed of a placement failed are not taken for its best, unless hardly any are left.
    """
    runs = finished(summary["runs"])
    failed = {(run["placement"], run["lr"]) for run in runs if run["diverged"] or run["collapsed"]}
    sound = [cell for cell in cells if (cell.placement, cell.lr) not in failed and math.isfinite(cell.mean)]
    kept = sound if len({cell.placement for cell in sound}) > 1 else cells
    said = headline(kept, summary)[:1] + standings(kept, summary)
    if runs:
        said += [*failures(summary, "diverged"), *failures(summary, "collapsed")] or ["No run diverged or collapsed."]
    return said + stable_rates(summary) + metric(summary) + missing(summary["runs"])


def standings(cells: list[Cell], summary: dict[str, Any]) -> list[str]:
    """Name the three lowest losses, each placement at its best rate, and say where the familiar placements stand."""
    best: dict[str, Cell] = {}
    for cell in fair(cells):
        best.setdefault(cell.placement, cell)
    if len(best) < 4:
        return []
    several = len({run["lr"] for run in summary["runs"]}) > 1
    where = {name: f" at {rate(cell.lr)}" if several else "" for name, cell in best.items()}
    top = [f"{best[name].label}, {best[name].loss}{where[name]}" for name in list(best)[:3]]
    said = [f"The three lowest of {len(best)}{', each at its best rate' if several else ''}: {'; '.join(top)}."]
    places = {name: i for i, name in enumerate(best, 1)}
    stands = [
        f"{best[name].label} is {ordinal(places[name])} ({number(best[name].mean)}{where[name]})"
        for name in best
        if name in FAMILIAR
    ]
    lost = {cell["placement"] for cell in table(summary)} - best.keys()
    stands += [f"{label(name)} failed {'at every rate' if several else 'there'}" for name in FAMILIAR if name in lost]
    return said + ([f"{join_words(stands)}."] if stands else [])


def failures(summary: dict[str, Any], verb: str) -> list[str]:
    """Count the placements to which it happened, by learning rate; few are named."""
    runs = finished(summary["runs"])
    hit = {(run["placement"], run["lr"]) for run in runs if run[verb]}
    names = {placement for placement, _ in hit}
    if not names:
        return []
    seeds = "" if len(summary["seeds"]) == 1 else " in at least one seed"
    if len(names) <= 3:
        who = [
            f"{label(name)} at {join_words([rate(lr) for lr in sorted(lr for other, lr in hit if other == name)])}"
            for name in unique(run["placement"] for run in runs)
            if name in names
        ]
        said = f"{verb.capitalize()}{seeds}: {'; '.join(who)}."
    else:
        at = [f"{sum(lr == other for _, other in hit)} at {rate(lr)}" for lr in sorted({lr for _, lr in hit})]
        said = f"{len(names)} placements {verb}{seeds}: {join_words(at)}."
    if verb == "collapsed":
        said += what_collapsed_means(summary)
    return [said]


def stable_rates(summary: dict[str, Any]) -> list[str]:
    """Say how many placements train without a failure up to which learning rate; few, and the familiar, are named."""
    rows = [row for row in matrix(summary).rows if any(row.cells)]
    if len(summary["lrs"]) == 1 or not rows:
        return []
    groups: dict[float | None, list[str]] = {}
    for row in sorted(rows, key=lambda row: -(row.stable_rate or 0.0)):
        groups.setdefault(row.stable_rate, []).append(row.placement)
    said = []
    for stable, names in groups.items():
        familiar = [label(name) for name in FAMILIAR if name in names]
        who = join_words([label(name) for name in names]) if len(names) <= 3 else str(len(names))
        if len(names) > 3 and familiar:
            who += f" ({join_words(familiar)} among them)"
        said.append(f"{'none' if stable is None else rate(stable)} for {who}")
    return [f"Largest stable learning rate: {'; '.join(said)}."]


def missing(runs: list[Run]) -> list[str]:
    """Say which runs are not finished."""
    left = len(runs) - len(finished(runs))
    starved = unique(label(run["placement"]) for run in runs if run["status"] == "out_of_memory")
    said = [f"Unfinished: {left} of {count(len(runs), 'run')} missing, so this can still change."] if left else []
    return said + ([f"Out of memory: {join_words(starved)}."] if starved else [])


def finished(runs: list[Run]) -> list[Run]:
    """The runs that trained to their end."""
    return [run for run in runs if run["status"] == "finished"]


def unique(items: Iterable[str]) -> list[str]:
    """Each item once, in the order of appearance."""
    return list(dict.fromkeys(items))


def count(n: int, noun: str) -> str:
    """Write a count with its noun.

    >>> count(1, "seed"), count(2, "seed")
    ('1 seed', '2 seeds')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
