"""The factor by which gradients must still be multiplied: 1/loss scale (fp16), a clip's coefficient, or both.

A fused update multiplies while it reads gradients (one_pass.py, offload.py), and does not write them back. Any other
optimizer gets gradients that are multiplied already (`OnDevice.hand_means_to_optimizer`).
"""

from dataclasses import dataclass

import torch

from zero_mini.update.loss_scale import LossScaler


@dataclass
class Factor:
    """The same on every rank."""

    scaler: LossScaler | None = None  # None unless the model computes in fp16
    value: torch.Tensor | None = None  # (0-dim) the factor; None: 1. A fused step keeps it until zero_grad()
    clipped: bool = False  # `value` includes a clip's coefficient
    scaled: bool = False  # a loss was multiplied by the scale, since the last step
    overflow: bool | None = None  # did this step's gradients overflow on any rank? None: not known yet
    stepped: bool = True  # the last step was not skipped

    def forget(self) -> None:
        """Called when gradients were multiplied by the factor, or dropped."""
        self.value, self.clipped = None, False
