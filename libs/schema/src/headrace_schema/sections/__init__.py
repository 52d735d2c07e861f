"""The sections of specs: what a user writes under each key, with bounds and defaults. Knows no combination of them."""
