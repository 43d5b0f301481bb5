"""Tasks: what one loop trains, each with its data, kind of model, loss and metrics.

>>> list(TASKS)
['lm', 'mlm', 'classification', 'translation', 'vision', 'diffusion']
"""

from normstream.names import nearest
from normstream.tasks.classification import TextClassification
from normstream.tasks.diffusion import Diffusion
from normstream.tasks.language_modeling import LanguageModeling
from normstream.tasks.masked_lm import MaskedLanguageModeling
from normstream.tasks.task import Artifact, Losses, Metric, Task, TaskData, TaskName
from normstream.tasks.translation import Translation
from normstream.tasks.vision import Vision

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (LanguageModeling, MaskedLanguageModeling, TextClassification, Translation, Vision, Diffusion)
}
"""Every task by its name."""


def get_task(name: str) -> type[Task]:
    """The task named so; raises ValueError with the nearest name for an unknown one.

    >>> get_task("lm").title
    'language modelling'
    """
    if not isinstance(name, str) or name not in TASKS:
        raise ValueError(f"unknown task {name!r}; {nearest(str(name), TASKS)}")
    return TASKS[name]


__all__ = ["TASKS", "Artifact", "Losses", "Metric", "Task", "TaskData", "TaskName", "get_task"]
