"""Versions of weights: published into a host's memory, served, and taken by others."""
