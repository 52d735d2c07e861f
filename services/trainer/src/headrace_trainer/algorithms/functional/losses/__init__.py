"""Losses of policies and critics, and of learning from given tokens or a teacher."""
