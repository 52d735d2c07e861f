"""The process beside a simulator's children that alone speaks to engines of containers."""
