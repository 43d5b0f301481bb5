"""What all benchmarks let one choose, and what they set before they measure."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.harness import Clock, CpuClock, CudaClock
from benchmarks.results import RESULTS, Result
from normstream.machine import physical_cores, tune_allocator


@dataclass(frozen=True, kw_only=True)
class Common:
    """Where and how to measure."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA if it is there."""
    threads: int | None = None
    """Threads of torch on a CPU; None takes the physical cores."""
    clock: Literal["auto", "thread", "wall"] = "auto"
    """On a CPU: CPU time of the thread or time on the wall; auto takes the former with one thread."""
    tuned_allocator: bool = True
    """On Linux: keep freed memory in the process, as normstream's training does."""
    out: Path = RESULTS
    """Folder of the result file."""

    def start(self, name: str, **described: Any) -> Result:
        """Sets threads and allocator; an empty result that says so."""
        device = torch.device(self.resolved_device)
        threads = self.threads or physical_cores()
        torch.set_num_threads(threads)
        torch._dynamo.config.recompile_limit = 64  # many models share code here; none may fall back to eager silently
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        active = {
            "device": device.type,
            "threads": threads,
            "allocator": tune_allocator() if self.tuned_allocator else "default",
        }
        settings = {key: value for key, value in asdict(self).items() if key != "out"}
        return Result(name, device, settings | active | {"clock": self.build_clock().name} | described)

    @property
    def resolved_device(self) -> str:
        """cpu or cuda."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def build_clock(self, ahead: float = 0.0) -> Clock:
        """The clock, for the threads that are set; ``ahead`` as for ``CudaClock``."""
        if self.resolved_device == "cuda":
            return CudaClock(ahead)
        if self.clock == "auto":
            return CpuClock("thread" if torch.get_num_threads() == 1 else "wall")
        return CpuClock(self.clock)
