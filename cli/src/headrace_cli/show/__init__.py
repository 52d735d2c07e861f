"""How runs and fleets look in a terminal. Knows no HTTP and starts nothing."""
