"""How a run's models lie on the ranks: layouts in the order of their cost, the bytes of each, and what is refused."""
