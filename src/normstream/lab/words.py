"""What the pages of a comparison say that depends on its task."""

from typing import Any

from normstream.tasks import Metric, Task, get_task
from normstream.training.divergence import COLLAPSE_MARGIN

Summary = dict[str, Any]


def task_of(summary: Summary) -> type[Task]:
    """The task of a comparison; ValueError with the nearest name for one that is not known here.

    >>> task_of({"task": "lm"}).unit
    'tokens'
    """
    return get_task(summary["task"])


def measured(summary: Summary) -> list[Metric]:
    """The task's metrics that some run has: F1 is only of two classes, for one.

    >>> measured({"task": "classification", "runs": [{"metrics": {"accuracy": 50.0}}]})[0].name
    'accuracy'
    """
    metrics, runs = task_of(summary).metrics, summary["runs"]
    return [metric for metric in metrics if any(run["metrics"].get(metric.name) is not None for run in runs)]


def loss_axis(task: type[Task]) -> str:
    """The loss with its unit, for an axis.

    >>> loss_axis(get_task("lm"))
    'validation loss (nats per token)'
    """
    return f"{task.loss_title} ({task.loss_unit})" if task.loss_unit else task.loss_title


def in_unit(task: type[Task]) -> str:
    """The unit of the loss as part of a sentence; empty if it has none.

    >>> in_unit(get_task("lm"))
    ' in nats per token'
    """
    return f" in {task.loss_unit}" if task.loss_unit else ""


def collapse_meaning(task: type[Task]) -> str:
    """What a collapsed run is.

    >>> collapse_meaning(get_task("lm"))
    'the final validation loss is not 0.05 below that of knowing only how frequent each token is'
    """
    return f"the final validation loss is not {COLLAPSE_MARGIN:g} below that of knowing only {task.baseline}"


def trained_on(summary: Summary) -> str:
    """How much data a run saw, in the unit of the task.

    >>> trained_on({"task": "lm", "tokens_per_run": 307_200, "config": {}})
    '307,200 tokens'
    """
    unit, config = task_of(summary).unit, summary["config"]
    n = summary["tokens_per_run"] if unit == "tokens" else config["steps"] * config["batch_size"]
    return f"{n:,} {unit}"


def data_line(summary: Summary) -> str:
    """Where the data is from, how much of it there is, and what made tokens of it, if anything did.

    >>> data = {"source": "digits", "train_size": 1000, "unit": "images", "tokenizer": None}
    >>> data_line({"data": data})
    'digits, 1,000 training images'
    """
    data = summary["data"]
    tokenizer = "" if data["tokenizer"] is None else f", tokenizer {data['tokenizer']}"
    return f"{data['source']}, {data['train_size']:,} training {data['unit']}{tokenizer}"
