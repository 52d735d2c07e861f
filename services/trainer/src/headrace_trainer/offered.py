"""What a trainer of this installation offers: backends and algorithms with the schemas of their options. No torch."""

from __future__ import annotations

import logging

from headrace_servicekit.registry import PluginError

from headrace_trainer.algorithms import ALGORITHMS
from headrace_trainer.backends import BACKENDS
from headrace_trainer.workloads import WORKLOADS

_LOG = logging.getLogger(__name__)


def capabilities() -> dict[str, list[str]]:
    """By facet, as an instance registers them."""
    found = {
        "backends": BACKENDS.installed(),
        "backend_options": BACKENDS.capabilities(_LOG.warning),
        "backend_features": BACKENDS.features(BACKENDS.names()),
        "algorithms": ALGORITHMS.names(),
        "algorithm_options": ALGORITHMS.capabilities(_LOG.warning),
        "algorithm_features": ALGORITHMS.features(ALGORITHMS.names()),
    }
    try:
        for workload in WORKLOADS.build_all():
            found |= workload.facets()
    except PluginError as error:
        _LOG.warning("workloads are left out: %s", error)
    return found
