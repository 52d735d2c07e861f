"""Keeps torchvision's CUDA-only registrations from being imported. See README.md."""

from __future__ import annotations

import sys
from types import ModuleType

sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
