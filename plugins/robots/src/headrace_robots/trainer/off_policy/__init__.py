"""Learning off policy: algorithms that draw from the replay store, their critics, and what a rank does with them."""
