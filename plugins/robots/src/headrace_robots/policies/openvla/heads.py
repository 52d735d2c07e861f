"""What OFT adds to OpenVLA, under the names that it publishes. Shapes as in `openvla.model`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Projector(nn.Module):
    """OFT's projector of a state, or of a noisy number of an action: one position of what is read."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, hidden)
        self.fc2 = nn.Linear(hidden, hidden)

    def forward(self, numbers: Tensor) -> Tensor:
        """(…, D) of (…, size)."""
        found: Tensor = self.fc2(F.gelu(self.fc1(numbers)))
        return found


class L1Head(nn.Module):
    """OFT's `L1RegressionActionHead`: a residual network on the hidden states of one action's numbers."""

    def __init__(self, hidden: int, action_size: int) -> None:
        super().__init__()
        self.model = _ResNet(hidden * action_size, hidden, action_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, A) of (…, D A)."""
        found: Tensor = self.model(hidden)
        return found


class DiffusionHead(nn.Module):
    """OFT's `DiffusionActionHead`: the same network, whose output is the noise of an action."""

    def __init__(self, hidden: int, action_size: int) -> None:
        super().__init__()
        self.noise_predictor = nn.ModuleDict(
            {"mlp_resnet": _ResNet(hidden * action_size, hidden, action_size)}
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, A) of (…, D A)."""
        found: Tensor = self.noise_predictor["mlp_resnet"](hidden)
        return found


class _ResNet(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int, blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, hidden)
        self.mlp_resnet_blocks = nn.ModuleList(_ResNetBlock(hidden) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, values: Tensor) -> Tensor:
        values = F.relu(self.fc1(self.layer_norm1(values)))
        for block in self.mlp_resnet_blocks:
            values = block(values)
        found: Tensor = self.fc2(self.layer_norm2(values))
        return found


class _ResNetBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.ReLU())

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = values + self.ffn(values)
        return found
