"""Messages to and from the trainer's own records."""
