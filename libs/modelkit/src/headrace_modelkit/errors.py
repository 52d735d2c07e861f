"""What goes wrong with a model or a tokenizer."""


class ModelNotReadable(ValueError):
    """`model.path` names no model that can be read; the message says what to change."""
