"""`python -m headrace_cli`: the same as `headrace`."""

from headrace_cli.main import main

main()
