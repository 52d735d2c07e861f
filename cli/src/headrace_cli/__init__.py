"""Headrace command line and Python client."""
