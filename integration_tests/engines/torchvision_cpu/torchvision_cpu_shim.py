"""Keeps torchvision's CUDA-only registrations from being imported: its wheel raises there beside a CPU build of torch.

A test arrangement: `ci/engines_vllm.sh` and `ci/engines_sglang.sh` import this at the start of every process of theirs.
"""

from __future__ import annotations

import sys
from types import ModuleType

sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
