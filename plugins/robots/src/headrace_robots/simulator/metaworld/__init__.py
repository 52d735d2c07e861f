"""Meta-World: its tasks, and a faster way to what they show."""
