"""Robots as a workload of Headrace: policies, how they act, how a trainer learns from episodes, and their simulators.

`policies` needs no service; `rollout`, `trainer`, `simulator` and `cli` each import that whose plug-in they are.
"""

import logging

LOG = logging.getLogger(__name__)
