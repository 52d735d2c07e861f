"""What the ranks of a trainer group do together: rounds, which the leader announces and each rank does its part of."""
