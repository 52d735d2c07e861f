"""`python -m headrace_coordinator.api.http.openapi [FILE]`: writes the API's description."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from headrace_coordinator.api.http.app import make_app


def description() -> str:
    """The OpenAPI document as text, the same every time."""
    nobody: Any = None  # Routes are described, never called.
    return json.dumps(make_app(nobody, runs_directory=Path()).openapi(), indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Writes to FILE, or to standard output."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(description())
    else:
        sys.stdout.write(description())


if __name__ == "__main__":
    main()
