"""What must hold of a world, read from its log."""
