"""Checkpoints as disk transactions: written aside, verified, set aside, forked."""
