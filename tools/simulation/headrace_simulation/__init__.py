"""A seeded simulation of the whole protocol under virtual time: the real coordinator on a faulty, simulated fleet."""
