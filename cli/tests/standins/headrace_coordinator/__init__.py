"""A stand-in for the real package of this name, found first on PYTHONPATH."""
