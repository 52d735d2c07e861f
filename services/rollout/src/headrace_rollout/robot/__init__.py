"""Robots: a policy that acts in the environments of simulators."""
