"""The commands of clusters: `headrace --help` lists them and imports no engine of a cluster."""

import subprocess
import sys

LOADED = """
import sys
from headrace_cli.main import app
import typer
names = typer.main.get_command(app).commands
print("ray" in names, "ray" in sys.modules)
"""


def test_the_command_line_lists_ray_without_importing_it():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"], done.stderr
