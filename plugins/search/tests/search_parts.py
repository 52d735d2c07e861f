"""What the tests search."""

TEXTS = [
    "The Danube flows through Ulm.",
    "Cats sleep all day.",
    "Ulm has a minster.",
    "The Rhine flows through Basel.",
    "Dogs bark at night.",
]
