"""Publishing and taking weights: the names that services use."""

from headrace_servicekit.weights.receiving import ReceivedWeights, receive_base, receive_weights, ways_of
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import (
    BASE_NUMBER,
    PendingWeights,
    StoredWeights,
    base_name,
    joined,
    part_name,
)
from headrace_servicekit.weights.ways import Links, Way

__all__ = [
    "BASE_NUMBER",
    "Links",
    "PendingWeights",
    "ReceivedWeights",
    "StoredWeights",
    "Way",
    "WeightServicer",
    "WeightStore",
    "base_name",
    "joined",
    "part_name",
    "receive_base",
    "receive_weights",
    "ways_of",
]
