"""The Headrace reward service: scorers in killable children."""
