"""The figures that a training step has to reach, from the rows of a result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.harness import divided, total
from benchmarks.results import Target
from benchmarks.shapes import ModelShape

Row = Mapping[str, Any]
DOCUMENTED = {"llama": "eager", "x-transformers": "eager", "litgpt": "compiled"}
"""How each library's documentation trains: litgpt's pretraining script compiles, the others' examples do not."""
GPU_OVERHEAD = {1024: 1.032, 2048: 1.019, 4096: 1.011}
"""SiameseNorm / Pre-Norm, both compiled, by width."""


def targets(rows: Sequence[Row], device: torch.device, shape: ModelShape) -> list[Target]:
    """All figures, precision by precision."""
    precisions = dict.fromkeys(row["precision"] for row in rows)
    on_gpu = device.type == "cuda"
    return [
        target
        for precision in precisions
        for target in _Figures({row["variant"]: row for row in rows if row["precision"] == precision}, precision)(
            on_gpu, shape
        )
    ]


class _Figures:
    """The figures of one precision."""

    def __init__(self, rows: Mapping[str, Row], precision: str) -> None:
        self.rows, self.precision = rows, precision

    def __call__(self, on_gpu: bool, shape: ModelShape) -> Iterator[Target]:
        yield from self._two_streams(on_gpu, shape)
        yield from self._against_others()
        most = 0.95 if on_gpu else 0.92
        yield self.ratio("siamese_hybrid_pre/ops/compiled", "official/eager", most)
        yield from self._utilization(on_gpu)
        for mode in ("eager", "compiled"):
            yield self.memory(f"siamese/ops/{mode}", f"pre/ops/{mode}", 1.125)
        yield self.memory("siamese/rebuilt/eager", "pre/ops/eager", 1.005)

    def _two_streams(self, on_gpu: bool, shape: ModelShape) -> Iterator[Target]:
        compiled = GPU_OVERHEAD.get(shape.dim, 1.05) if on_gpu else 1.05
        yield self.ratio("siamese/ops/compiled", "pre/ops/compiled", compiled)
        yield self.ratio("siamese/ops/eager", "pre/ops/eager", 1.04)
        yield self.ratio("siamese/ops/eager", "pre/plain/eager", 1.00)

    def _against_others(self) -> Iterator[Target]:
        documented = 0.90 if self.precision == "bf16" else 1.0
        for library, mode in DOCUMENTED.items():
            yield self.ratio("pre/ops/compiled", f"{library}/{mode}", documented, ", as documented")
            yield self.ratio("pre/ops/compiled", f"{library}/compiled", 1.0, ", compiled as well")

    def _utilization(self, on_gpu: bool) -> Iterator[Target]:
        if on_gpu and self.precision == "fp32":
            return
        least = 0.50 if on_gpu else {"fp32": 0.85, "bf16": 0.70}[self.precision]
        for placement in ("pre", "siamese"):
            name = f"{placement}/ops/compiled"
            values = self.rows[name]["shares"] if name in self.rows else ()
            yield self._target(f"MFU of {name}", least, True, values, (name,))

    def ratio(self, above: str, below: str, limit: float, words: str = "") -> Target:
        """One step over another."""
        values: Sequence[float] = ()
        if above in self.rows and below in self.rows:
            values = divided(total(self.rows[above]["seconds"]), total(self.rows[below]["seconds"]))
        return self._target(f"step of {above} / {below}{words}", limit, False, values, (above, below))

    def memory(self, above: str, below: str, limit: float) -> Target:
        """What one keeps for the backward pass over what another keeps."""
        values: Sequence[float] = ()
        if above in self.rows and below in self.rows:
            values = [self.rows[above]["kept_bytes"] / self.rows[below]["kept_bytes"]]
        return self._target(f"kept bytes of {above} / {below}", limit, False, values, (above, below))

    def _target(
        self, label: str, limit: float, at_least: bool, values: Sequence[float], names: tuple[str, ...]
    ) -> Target:
        missing = [name for name in names if name not in self.rows]
        reason = f"{' and '.join(missing)} did not run here" if missing else ""
        return Target(f"{label} ({self.precision})", limit, at_least, tuple(values), reason)
