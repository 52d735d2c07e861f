"""The worker group: the instances that a run was granted, and its clients of them."""
