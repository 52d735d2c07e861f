"""Coding tasks: read from a folder or a file, solved in a container, judged in another one."""
