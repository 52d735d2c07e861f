"""Streams of samples that serve a run: assignments come in, chunks and trajectories go out."""
