"""A recording of a step, said again to one service that is started for it. Imports no service."""
