"""`backend_ranks.py` with layers of an imaginary Transformer Engine, which computes on the CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RANKS = HERE.parents[2] / "services/trainer/tests/backend_ranks.py"
sys.path[:0] = [str(HERE / "imaginary"), str(RANKS.parent)]

if __name__ == "__main__":
    from headrace_megatron import models

    models.uses_engine = lambda wanted, device, dtype: wanted == "auto"
    runpy.run_path(str(RANKS), run_name="__main__")
