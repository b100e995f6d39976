"""Tasks: scenes drawn from a seed, questions about them, and scores. No model is needed here."""

from conduit_kv.tasks.items import Item, messages
from conduit_kv.tasks.registry import Protocol, Task, get_task, task_names

__all__ = ["Item", "Protocol", "Task", "get_task", "messages", "task_names"]
