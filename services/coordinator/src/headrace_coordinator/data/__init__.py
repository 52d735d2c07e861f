"""Where prompts come from: sources by name, and the held-out and training parts of a run."""

from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.prompts import PromptContent
from headrace_coordinator.data.sources import SOURCES, DataSource

__all__ = ["SOURCES", "DataItem", "DataSource", "Dataset", "PromptContent"]
