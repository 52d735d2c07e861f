"""What is checked when a spec is submitted, so that nothing starts in vain."""
