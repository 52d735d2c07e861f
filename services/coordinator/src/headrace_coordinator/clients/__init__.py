"""Typed calls to the instances, with deadlines."""
