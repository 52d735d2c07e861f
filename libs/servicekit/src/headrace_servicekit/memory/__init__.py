"""Memory of this host: bodies on a tmpfs, what malloc keeps, and how many more processes fit."""
