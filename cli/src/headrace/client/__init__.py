"""Typed Python client of the coordinator's HTTP API."""
