"""Prompts and verifiable rewards, one file a family. `get(name)` returns a task; nothing here runs a model."""

from sparroll.tasks import synthetic as _synthetic
from sparroll.tasks.base import Split, Task, get, names, register

_synthetic.register_all()

__all__ = ["Split", "Task", "get", "names", "register"]
