"""Plan trees: what one is, how many seconds it takes, and the search for the fastest."""
