"""The coordinator's HTTP API."""

from headrace_coordinator.http.app import make_app

__all__ = ["make_app"]
