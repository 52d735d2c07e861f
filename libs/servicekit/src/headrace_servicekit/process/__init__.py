"""Processes: supervisors, children that can be killed, memory."""
