"""The replay store: episodes that are learned from again and again, on disk, and drawn by their chunks."""
