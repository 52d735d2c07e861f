"""Engines that run in processes of their own and take requests by token ids: one adapter, a backend for each."""

from __future__ import annotations

from headrace_rollout.engines.hosted.backend import Backend, BackendFailed, Deadlines, Request, Start, Tokens
from headrace_rollout.engines.hosted.engine import HostedEngine

__all__ = ["Backend", "BackendFailed", "Deadlines", "HostedEngine", "Request", "Start", "Tokens"]
