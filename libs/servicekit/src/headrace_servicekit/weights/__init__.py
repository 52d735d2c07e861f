"""Publishing and taking weights: the names that services use."""

from headrace_servicekit.weights.pending import PendingWeights, StoredWeights
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.transfer import ReceivedWeights, WeightServicer, receive_weights

__all__ = [
    "PendingWeights",
    "ReceivedWeights",
    "StoredWeights",
    "WeightServicer",
    "WeightStore",
    "receive_weights",
]
