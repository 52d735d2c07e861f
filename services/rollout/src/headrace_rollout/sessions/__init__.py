"""Conversations of a language model with environments."""
