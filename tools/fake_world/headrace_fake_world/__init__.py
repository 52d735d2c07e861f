"""The trainer's own step on imaginary devices: one rank of many, with torch's fake tensors and fake process group.

No element is computed: only shapes, types, devices and lifetimes are real. So a 70B model on 64 ranks is measured in
seconds on a laptop: bytes by kind at the peak, collectives by kind, and whether a tensor is on the wrong device.
"""
