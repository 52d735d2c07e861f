"""Keeps torchvision's CUDA-only registrations from being imported: its wheel raises there beside a CPU build of torch.

A test arrangement: `ci.engines.environments` has every process of the engines' CPU environments import this.
"""

from __future__ import annotations

import sys
from types import ModuleType

sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
