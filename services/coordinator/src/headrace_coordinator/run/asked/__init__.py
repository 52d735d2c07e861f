"""What a session run does for its loop: calls in their order, and samples."""
