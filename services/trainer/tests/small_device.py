"""A trainer process whose device has no room for large micro-batches: `python small_device.py PORT_FILE SHM_DIR WHERE
KEPT AGAIN`.

Its second layer raises torch.OutOfMemoryError in the `forward` or `backward` pass (WHERE; or `never`) of more than KEPT
places, or of more than AGAIN where layers are computed again. A checkpointed layer keeps nothing, as on a real device.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from headrace_trainer.backends.fsdp.sharding import ShardedModel

WHERE, KEPT, AGAIN = sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
made = ShardedModel.__init__


def no_room(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 is full.")


def after(layer, _inputs, out):
    hidden = out[0] if isinstance(out, tuple) else out
    again = layer.gradient_checkpointing and layer.training
    if not torch.is_grad_enabled() or hidden.numel() // hidden.shape[-1] <= (AGAIN if again else KEPT):
        return
    if WHERE == "forward":
        no_room()
    elif WHERE == "backward" and hidden.requires_grad:
        hidden.register_hook(no_room)


def full(self, policy, layers, *arguments, **named):
    layers = list(layers)
    made(self, policy, layers, *arguments, **named)
    layers[1].register_forward_hook(after)


ShardedModel.__init__ = full
sys.argv = sys.argv[:3]
runpy.run_path(str(Path(__file__).parent / "two_ranks.py"), run_name="__main__")
