"""What differs from family to family: a module each, only where something does."""
