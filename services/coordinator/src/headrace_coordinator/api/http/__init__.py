"""The coordinator's HTTP API."""

from headrace_coordinator.api.http.app import make_app

__all__ = ["make_app"]
