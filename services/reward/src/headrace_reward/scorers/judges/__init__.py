"""Scorers that ask a model: a judge behind an OpenAI-compatible endpoint, and reward models."""
