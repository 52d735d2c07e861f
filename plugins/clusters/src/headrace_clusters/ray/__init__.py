"""Fleets on Ray: a placement group, and an actor a node. Nothing of the data path goes through Ray."""
