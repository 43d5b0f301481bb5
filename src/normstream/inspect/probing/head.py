"""The matrix that makes logits."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from normstream.inspect.anatomy import Call
from normstream.inspect.hooks import Recorder, Run, tensors_in
from normstream.inspect.probing.silent import Port, bump_like, gain_of, has_moved
from normstream.inspect.probing.subject import Subject


def find_head(
    recorder: Recorder, inputs: Mapping[str, Any], real: Run, subject: Subject, end_of_layers: int
) -> tuple[Call | None, float | None]:
    """The last matrix behind the layers whose output makes the model's result, and the factor between the two.

    The factor is None where the result is not in proportion (a soft cap). No head: (None, None).
    """
    logits = next(tensors_in(real.result), None)
    late = [r for r in real.records.values() if r.start > end_of_layers and r.call.path in subject.matrices]
    for record in reversed(late):
        if logits is None or record.output is None or record.output.numel() != logits.numel():
            continue
        bump = bump_like(record.output)
        run = recorder.run(inputs, Port(record.call, "output").changed(lambda given, bump=bump: given + bump))
        moved = next(tensors_in(run.result))
        if has_moved(logits, moved):
            gain = gain_of(logits, moved, bump)
            return record.call, gain.factor if gain.is_exact else None
    return None, None


def is_tied(model: nn.Module, head: Call | None) -> bool:
    """Whether the head's matrix is the very tensor of an embedding."""
    if head is None:
        return False
    weights = {id(weight) for weight in model.get_submodule(head.path).parameters(recurse=False)}
    return any(id(module.weight) in weights for module in model.modules() if isinstance(module, nn.Embedding))
