"""Runs whose steps are asked for by a loop of the user's own (`workflow: session`)."""
