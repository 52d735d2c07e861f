"""The public events of runs as files: each run's history, read by page."""

from headrace_coordinator.store.history.files import Item
from headrace_coordinator.store.history.history import TAIL_LIMIT, History

__all__ = ["TAIL_LIMIT", "History", "Item"]
