"""Transformer Engine as far as Megatron's layers call it, with the signatures of 2.20.2, on a CPU by torch.

`test_megatron_engine.py` compares the signatures with those of the package itself.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
