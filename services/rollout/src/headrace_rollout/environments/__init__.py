"""Environments at simulators: pools of them, and the running of samples in them."""
