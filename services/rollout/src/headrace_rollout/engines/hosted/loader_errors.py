"""What the loaders of an engine's models raise for tensors that they cannot take. Knows no engine.

In a worker such an error is an answer and is not raised: SGLang ends on what a loader raises, and vLLM's core reads the
answers of several workers only up to the first error, so that the next call would get the last one's.
"""

LOADER_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    AssertionError,
    TypeError,
    AttributeError,
)
