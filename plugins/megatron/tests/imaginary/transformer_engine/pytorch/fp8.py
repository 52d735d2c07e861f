"""Names that Megatron imports."""

from contextlib import nullcontext

fp8_autocast = nullcontext


class FP8GlobalStateManager:
    """No fp8."""
