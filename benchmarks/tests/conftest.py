"""The benchmarks are scripts, not a package: their folder goes on the path, as Python puts it there for a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
