"""Conversations with a language model: a user's own class, and what is built in."""
