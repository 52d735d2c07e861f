"""A simulated cluster that executes plan trees: sampled lengths, switches, elastic moves. Pure."""

from headrace_planner.cluster.simulating import (
    Simulated,
    elastic_terms,
    simulate,
    simulate_elastic,
)
from headrace_planner.cluster.spans import Label, Place, Span, Timeline, by_label

__all__ = [
    "Label",
    "Place",
    "Simulated",
    "Span",
    "Timeline",
    "by_label",
    "elastic_terms",
    "simulate",
    "simulate_elastic",
]
