"""The Headrace simulator service: pools of environments."""
