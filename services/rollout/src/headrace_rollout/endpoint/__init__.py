"""Agents that speak with the policy as with an OpenAI-compatible server."""
