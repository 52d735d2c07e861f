"""Held-out items and suites under the installed policy: nothing here is trained."""
