"""What a rescaling did to a model and how far it was verified, as plain data, JSON and a terminal table."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

LARGEST = 65504.0
"""Largest finite number of fp16."""


@dataclass(frozen=True)
class PeakRow:
    """Largest |h| on the stream in one layer, from its input to its output."""

    stack: str
    layer: int
    before: float
    after: float


@dataclass(frozen=True)
class EpsRow:
    """Norms whose eps was changed from the same value."""

    norms: tuple[str, ...]
    before: float
    after: float


@dataclass(frozen=True)
class DtypeRun:
    """The model run with its parameters in another dtype."""

    dtype: str
    is_finite: bool
    """Whether every logit, and the stream everywhere, is a number."""
    error: float | None
    """Of the logits, from the original ones in float64, over the largest of those; None if not finite."""
    peak: float
    clamps: int = 0
    """Clamps that changed something."""
    problem: str | None = None
    """Why it does not run at all in this dtype, on this machine."""


@dataclass(frozen=True)
class BranchRow:
    """A value inside a branch that is too large for fp16, wherever the stream is."""

    sublayer: str
    call: str
    side: str
    """``input`` or ``output`` of the module."""
    peak: float
    split: int | None
    """Power of two that it was divided by, exactly; None where that cannot be done."""
    after: float
    why: str
    """Which matrices were scaled against each other, or why none could be."""


@dataclass(frozen=True)
class RescaleReport:
    """A rescaling h -> h / 2^k. Errors are largest differences of the logits over the largest logit."""

    source: str
    k: int
    method: str
    """``weights``, or ``config`` where its multipliers do it alone."""
    peaks: tuple[PeakRow, ...]
    headroom: float
    """65,504 over the largest |h| afterwards."""
    error_fp64: float
    is_bit_equal_fp32: bool
    fp16_before: DtypeRun
    fp16_after: DtypeRun
    fp16_fp32_gains: DtypeRun | None
    """With the zero-centred gains that were scaled kept in float32; None if there are none."""
    eps: tuple[EpsRow, ...]
    config: dict[str, Any]
    """New values of the config."""
    untied: str | None
    """The head that got a matrix of its own."""
    n_weights: int
    n_subnormal: int
    """Weights that were normal numbers of fp16 and are subnormal now, with fewer bits than they had."""
    n_flushed: int
    """Those among them that fp16 rounds to zero."""
    n_zero_centred: int
    """Gains 1 + w that were scaled; their w is no power of two away from the old one."""
    zero_centred_error: float
    """Largest relative error of such a gain from storing w."""
    zero_centred_error_fp16: float
    """The same if w were stored in fp16."""
    branches: tuple[BranchRow, ...]
    inexact: tuple[str, ...] = field(default=())
    """Where the function could not be kept exactly; the error above includes it."""
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Everything as strict JSON: numbers that are not finite become None."""
        return _strict(asdict(self))

    @property
    def peak_before(self) -> float:
        return max(row.before for row in self.peaks)

    @property
    def peak_after(self) -> float:
        return max(row.after for row in self.peaks)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    is_number = not isinstance(value, float) or abs(value) <= 1e308
    return value if is_number else None


def tables(report: RescaleReport) -> Group:
    """The report for a terminal."""
    return Group(*_tables(report))


def _tables(report: RescaleReport) -> Iterator[Any]:
    summary = Table("", "", show_header=False, box=None)
    for key, value in _summary(report).items():
        summary.add_row(key, escape(value))
    yield summary
    peaks = Table("stack", "layer", "peak before", "peak after", "head-room after", title="largest |h|", box=None)
    for row in report.peaks:
        room = f"{LARGEST / row.after:.3g} x" if row.after else "-"
        peaks.add_row(row.stack, str(row.layer), f"{row.before:.5g}", f"{row.after:.5g}", room)
    yield peaks
    if report.branches:
        table = Table(
            "sublayer", "where", "peak", "divided by", "peak after", "how", title="too large inside branches", box=None
        )
        for row in report.branches:
            by = "-" if row.split is None else f"2^{row.split}"
            where = f"{row.side} of {row.call}"
            table.add_row(row.sublayer, escape(where), f"{row.peak:.5g}", by, f"{row.after:.5g}", escape(row.why))
        yield table
    for label, sentences in (("not exact", report.inexact), ("note", report.notes)):
        for sentence in sentences:
            yield escape(f"{label}: {sentence}")


def _summary(report: RescaleReport) -> dict[str, str]:
    rows = {
        "scale": f"h / 2^{report.k} = h / {2**report.k}, by its {report.method}",
        "largest |h|": f"{report.peak_before:.5g} -> {report.peak_after:.5g}: {report.headroom:.3g} x room in fp16",
        "logits, float64": f"relative error {report.error_fp64:.1e}",
        "logits, float32": "bit-equal" if report.is_bit_equal_fp32 else "not bit-equal",
        "fp16 before": _run_words(report.fp16_before),
        "fp16 after": _run_words(report.fp16_after),
    }
    if report.fp16_fp32_gains:
        rows["fp16, 1 + w gains in fp32"] = _run_words(report.fp16_fp32_gains)
        rows["1 + w gains"] = (
            f"{report.n_zero_centred:,} scaled, relative rounding error {report.zero_centred_error:.1e} as stored, "
            f"{report.zero_centred_error_fp16:.1e} in fp16"
        )
    for row in report.eps:
        rows[f"eps of {len(row.norms)} norms"] = f"{row.before:.3g} -> {row.after:.3g}"
    for key, value in report.config.items():
        rows[f"config {key}"] = str(value)
    if report.untied:
        rows["untied"] = f"{report.untied} has a matrix of its own now"
    rows["fp16 subnormals"] = (
        f"{report.n_subnormal:,} of {report.n_weights:,} weights became subnormal, {report.n_flushed:,} of them zero"
    )
    return rows


def _run_words(run: DtypeRun) -> str:
    clamps = f", {run.clamps} clamps changed values" if run.clamps else ""
    if run.problem is not None:
        return f"does not run: {run.problem}"
    if not run.is_finite:
        return f"overflows{clamps}"
    return f"finite, relative error {run.error:.1e}{clamps}"
