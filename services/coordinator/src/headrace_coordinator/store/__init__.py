"""Durable state: the event log and its store, and the histories of runs in files."""
