"""Combinations of a spec's values that cannot work, found without a fleet: rules yield problems with their fixes."""
