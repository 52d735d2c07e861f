"""What a trainer of this installation offers: backends and algorithms with the schemas of their options. No torch."""

from __future__ import annotations

import logging

from headrace_trainer.algorithms import ALGORITHMS
from headrace_trainer.algorithms.episodes import EPISODE_ALGORITHMS
from headrace_trainer.backends import BACKENDS, installed_backends

_LOG = logging.getLogger(__name__)


def capabilities() -> dict[str, list[str]]:
    """By facet, as an instance registers them."""
    return {
        "backends": installed_backends(),
        "backend_options": BACKENDS.capabilities(_LOG.warning),
        "algorithms": ALGORITHMS.names(),
        "algorithm_options": ALGORITHMS.capabilities(_LOG.warning),
        "algorithm_features": ALGORITHMS.features(ALGORITHMS.names()),
        "episode_algorithms": EPISODE_ALGORITHMS.names(),
        "episode_algorithm_options": EPISODE_ALGORITHMS.capabilities(_LOG.warning),
        "episode_algorithm_features": EPISODE_ALGORITHMS.features(EPISODE_ALGORITHMS.names()),
    }
