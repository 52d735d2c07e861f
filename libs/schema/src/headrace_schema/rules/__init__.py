"""Combinations of a spec that cannot work, found without a fleet: each rule yields problems with their fixes."""
