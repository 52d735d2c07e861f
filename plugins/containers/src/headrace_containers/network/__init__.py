"""What a container without a network reaches: connections that a relay in its name space hands to its owner."""
