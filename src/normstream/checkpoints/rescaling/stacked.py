"""Which parameters of a module are its last matrix, and which its first; also of a module that stacks experts."""

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from normstream.checkpoints.rescaling.feeders import is_matrix, near
from normstream.checkpoints.rescaling.stream_start import multiplied
from normstream.inspect.hooks import NO_CHANGES, Changes, Record, Recorder


def writing_parameters(recorder: Recorder, record: Record | None, module: nn.Module) -> tuple[nn.Parameter, ...]:
    """The fewest parameters that halve a module's output when they are halved: its last matrix and that one's bias.

    A matrix of its own need not have run: an expert that no token chose.

    Raises:
        ValueError: if there are none.
    """
    if is_matrix(module):
        return tuple(module.parameters(recurse=False))
    record = _ran(record, module)

    def is_last(chosen: Sequence[nn.Parameter]) -> bool:
        with multiplied(chosen, 0.5):
            return near(2 * _output(recorder, record), _kept(record.output, record))

    return _fewest(module, is_last, f"no parameters of {record.call} were found that scale what it writes")


def reading_parameters(recorder: Recorder, record: Record | None, module: nn.Module) -> tuple[nn.Parameter, ...]:
    """The fewest parameters that, doubled, make up for half the input: a module's first matrices, without biases.

    Raises:
        ValueError: if there are none: the module is not linear in what it reads.
    """
    if is_matrix(module):
        return tuple(parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1)
    record = _ran(record, module)
    halve = Changes(inputs={record.call: lambda given: given / 2})

    def is_first(chosen: Sequence[nn.Parameter]) -> bool:
        with multiplied(chosen, 2.0):
            return near(_output(recorder, record, halve), _kept(record.output, record))

    return _fewest(module, is_first, f"{record.call} reads the stream without a norm and without a matrix")


def _fewest(
    module: nn.Module, fits: Callable[[Sequence[nn.Parameter]], bool], problem: str
) -> tuple[nn.Parameter, ...]:
    parameters = sorted(module.parameters(), key=lambda parameter: -parameter.ndim)
    for size in (1, 2):
        for chosen in itertools.combinations(parameters, size):
            if fits(chosen):
                return chosen
    raise ValueError(f"{problem}; its parameters: {', '.join(name for name, _ in module.named_parameters())}")


def _ran(record: Record | None, module: nn.Module) -> Record:
    if record is None:
        raise ValueError(f"a {type(module).__name__} did not run on these inputs, so it is unknown; give others")
    return record


def _output(recorder: Recorder, record: Record, changes: Changes = NO_CHANGES) -> Tensor:
    return _kept(recorder.replay(record, changes).output(record.call), record)


def _kept(output: Tensor | None, record: Record) -> Tensor:
    if output is None:
        raise ValueError(f"{record.call} returned no tensor")
    return output
