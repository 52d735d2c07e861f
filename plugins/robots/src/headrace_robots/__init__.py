"""Robots as a workload of Headrace: policies, how they act in a rollout and how a trainer learns from their episodes.

`policies` needs no service; `rollout` and `trainer` each import the service whose plug-in they are.
"""

import logging

LOG = logging.getLogger(__name__)
