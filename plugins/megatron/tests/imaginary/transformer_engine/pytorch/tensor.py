"""Names that Megatron imports."""


class QuantizedTensor:
    """No fp8."""
