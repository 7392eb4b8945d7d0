"""fp16: the loss is multiplied by a scale, so that small gradients do not become zero; the scale adjusts itself.

    smallest number > 0     fp16  6e-8      a gradient of 1e-8 is zero, and the parameter never moves
    largest                 fp16  65504     a gradient of 1e5 is inf, and the update would destroy the model
    bf16 and fp32           1e-38 to 3e38   no scale needed

    zero.scale(loss).backward()   gradients are multiplied by the scale, the same one on every rank
    did any of them overflow?     one answer for all ranks: an inf in one rank's slice counts for all
      no    divided by the scale, clipped, used; after `growth_interval` such steps in a row the scale grows
      yes   the step is skipped on every rank, and the scale backs off

A scale is a power of two, so multiplying and dividing by it does not change a number that did not overflow. The host
must know whether to skip: this is the only place where it waits for the device in a step, and only in fp16.

Source: mixed-precision training, arXiv 1710.03740, section 3.2. The decisions are those of torch.amp.GradScaler,
which cannot be used itself: it looks only at one rank's gradients.

Left out: a separate scale for each layer; the scale as a tensor, for steps in which the host does not wait.
"""

from dataclasses import asdict, dataclass

import torch

from zero_mini.binding.parameter import plainly, set_grad

LARGEST_SCALE = torch.finfo(torch.float32).max  # the scaled loss is an fp32 number


@dataclass
class LossScaler:
    """The scale, and how many steps overflowed or did not. The same on every rank.

    >>> scaler = LossScaler(scale=4.0, growth_interval=2)
    >>> [(scaler.update(overflow), scaler.scale)[1] for overflow in (True, False, False, False, True)]
    [2.0, 2.0, 4.0, 4.0, 2.0]
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000  # steps in a row without overflow, after which the scale grows
    most_in_a_row: int = 25  # skipped steps; one more is an error
    good_in_a_row: int = 0
    skipped_in_a_row: int = 0
    skipped: int = 0  # steps in total

    def __post_init__(self):
        """ValueError for settings with which the scale cannot adjust itself."""
        for name, is_valid, requirement in (
            ("scale", 0 < self.scale < LARGEST_SCALE, "> 0 and finite"),
            ("growth_factor", 1 < self.growth_factor < LARGEST_SCALE, "> 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
            ("most_in_a_row", self.most_in_a_row >= 0, "at least 0"),
        ):
            if not is_valid:
                raise ValueError(f"{name} of a loss scaler must be {requirement} (got {getattr(self, name)})")

    def update(self, overflow: bool) -> None:
        """Called after each step, taken or skipped. RuntimeError after too many skipped in a row."""
        if not overflow:
            self.skipped_in_a_row = 0
            self.good_in_a_row += 1
            if self.good_in_a_row == self.growth_interval:
                self.good_in_a_row = 0
                if self.scale * self.growth_factor <= LARGEST_SCALE:
                    self.scale *= self.growth_factor
            return
        self.good_in_a_row = 0
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.scale *= self.backoff_factor
        if self.skipped_in_a_row > self.most_in_a_row:
            raise RuntimeError(
                f"gradients overflowed in {self.skipped_in_a_row} steps in a row, down to a loss scale of "
                f"{self.scale:g}: they are not finite at any scale; lower the learning rate, look for a loss that is "
                "inf or NaN, or train in bf16"
            )

    def state_dict(self) -> dict:
        """Settings and state, as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        """Load what `state_dict()` returned."""
        self.__init__(**state)


def scale(zero, loss: torch.Tensor) -> torch.Tensor:
    """The loss to call backward() on. In fp16 it is multiplied by the scale; otherwise it is the loss itself.

    RuntimeError between clip_grad_norm_ and the step: gradients that were already divided by the scale cannot be
    added to others.
    """
    if zero.factor.scaler is None:
        return loss
    if zero.factor.overflow is not None:
        raise RuntimeError(
            "zero.scale(loss) after this step's gradients were divided by the scale, as clip_grad_norm_ and "
            "full_params(grads=True) do: run every backward of a step before, or zero_grad() first"
        )
    zero.factor.scaled = True
    return loss * zero.factor.scaler.scale


def stepped(zero) -> bool:
    """False if the last step was skipped, because gradients overflowed."""
    return zero.factor.stepped


def scaler(zero) -> LossScaler | None:
    """The loss scale; None if the model does not compute in fp16."""
    return zero.factor.scaler


def look_for_overflow(zero) -> None:
    """After all means have arrived: is any element on any rank not finite? Set `factor.value` to 1 / scale."""
    if zero.factor.scaler is None or zero.factor.overflow is not None:
        return
    if not zero.factor.scaled and any(unit.mean_grad is not None for unit in zero.trainable):
        raise RuntimeError(
            "a step in fp16, but its loss was not scaled, so small gradients are lost: call zero.scale(loss).backward()"
        )
    largest = zero.comm.total_norm(zero.partial_norms(float("inf")), float("inf"))  # (0-dim) NaN stays NaN
    zero.factor.overflow = not largest.isfinite().item()
    zero.factor.value = torch.full((), 1 / zero.factor.scaler.scale, dtype=zero.master_dtype, device=zero.device)


def skip(zero) -> None:
    """Drop all gradients, so that the optimizer does nothing."""
    for unit in zero.trainable:
        unit.mean_grad = None
        with plainly():
            for _, piece in unit.pieces:
                set_grad(piece, None)


def end_step(zero) -> None:
    """After a step: update the scale. RuntimeError, on every rank, after too many overflows."""
    zero.factor.stepped = not zero.factor.overflow
    if zero.factor.scaler is not None:
        zero.factor.scaled, zero.factor.overflow = False, None
        zero.factor.forget()  # the next step's gradients may have another scale
        zero.factor.scaler.update(not zero.factor.stepped)
