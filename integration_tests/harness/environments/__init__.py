"""Environments of a user's own, each a file that a simulator loads."""
