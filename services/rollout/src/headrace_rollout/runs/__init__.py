"""An open run: its engine and weights, and the trajectories that it keeps."""
