"""Users' code of a contained fleet: no network but what an admin lists, and bounds of processes, memory and cores."""
