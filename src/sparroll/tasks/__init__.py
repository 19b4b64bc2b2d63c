"""Prompts and verifiable rewards; `get(name)` returns a task. synthetic/ makes problems from a seed, data/ reads
published sets and your files, math/ and code/ judge their answers, reward_function.py calls your own functions.

Not here: tokenizers, models, and what a reward is used for.
"""

from functools import partial as _partial

from sparroll.tasks.base import Split, Task, get, names, register
from sparroll.tasks.data.catalog import set_names as _set_names
from sparroll.tasks.reward_function import batch_reward
from sparroll.tasks.synthetic import task as _synthetic
from sparroll.tasks.verdicts import Verdict, has_answers, judge, pooled


def is_data(name: str) -> bool:
    """Whether the task's prompts are rows of a file, and the section [data] is about it."""
    return name == "data" or name in _set_names()


def _data_task(name: str) -> Task:
    # Its settings need pydantic, which not every user of the other tasks loads.
    from sparroll.tasks.data.task import data_task

    return data_task(name)


_synthetic.register_all()
for _name in ("data", *_set_names()):
    register(_name, _partial(_data_task, _name))

__all__ = [
    "Split",
    "Task",
    "Verdict",
    "batch_reward",
    "get",
    "has_answers",
    "is_data",
    "judge",
    "names",
    "pooled",
    "register",
]
