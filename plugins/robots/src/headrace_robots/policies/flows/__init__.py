"""Policies that draw actions by a flow: its steps, and what networks share whose prefix is read once."""
