"""Demonstrations of scripted policies: collected through the simulator service, written as LeRobot data sets."""
