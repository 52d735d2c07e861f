"""The backend of robot policies: a whole policy on each rank, gradients added up over the ranks."""
