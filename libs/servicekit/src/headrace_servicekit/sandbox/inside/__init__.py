"""What runs inside: it puts up the walls, forks a process for each case, and reports. Standard library only."""
