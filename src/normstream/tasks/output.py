"""Which command shows what a model of each task makes."""

OUTPUT = {"lm": "generate", "translation": "translate", "diffusion": "sample"}
"""The command that shows what a model of a task makes."""


def refuse_others(command: str, task: str) -> None:
    """Raises ValueError, with what fits, if a command is not for models of this task.

    >>> refuse_others("generate", "diffusion")
    Traceback (most recent call last):
    ValueError: this is a model of the task diffusion, which normstream generate is not for; take normstream sample
    """
    if OUTPUT.get(task) != command:
        fits = OUTPUT.get(task, "eval")
        raise ValueError(
            f"this is a model of the task {task}, which normstream {command} is not for; take normstream {fits}"
        )
