"""What happens to gradients between the backward pass and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from srforge.distributed import SRForgeError

_INTERVAL = 64
_SMALLEST_SCALE = 1e-4  # thirty skipped steps below where scalers begin; losses of any use need no smaller one
_MESSAGE = (
    "Gradients must be finite, but held NaN or inf in {}. Lower the learning rate, clip with `max_norm`, or set "
    "`non_finite` to skip such steps."
)


class NonFiniteGradientError(SRForgeError):
    """A gradient held NaN or inf, and the policy is to stop."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer steps; a hook may have added some since it was made."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Return the gradient's 2-norm over all parameters, and scale the gradient down to ``max_norm`` if it is above.

    Args:
        parameters: Those of one optimizer; ones without gradient are left out.
        max_norm: Largest norm to keep, > 0; None: measure only.

    Returns:
        Norm before clipping, shape ``()``, on the parameters' device. Gradients are equal on all ranks after the
        backward pass, so the norm is too.
    """
    kept = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in kept:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # entries of one place add up, also in the norm
    gradients = [p.grad.values() if p.grad.is_sparse else p.grad for p in kept if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(kept, max_norm, norm)
    return norm


def finite_part(norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return a norm as ``(sum, count)``, nothing where it is not finite: the mean over the steps that were taken."""
    is_finite = torch.isfinite(norm)
    return torch.where(is_finite, norm, 0.0), is_finite.to(torch.int64)


class FiniteGuard:
    """Watches the gradient norm of every optimizer step by the chosen policy, without making the host wait.

    Under ``raise`` a sum on the device is copied to the host every ``_INTERVAL`` steps and read one interval later,
    when it has long arrived; so the run ends at most two intervals late, and at the latest at the epoch's end.

    The norm is the same on every rank (one NaN anywhere is in the reduced gradient everywhere), so is each decision.

    Args:
        policy: ``raise``, ``skip``, ``ignore``, or ``count`` where a gradient scaler does the skipping.
        device: Where the norms are.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.policy = policy
        # One NaN or inf stays in a sum for good; finite float32 norms never overflow in float64.
        self._sum = torch.zeros((), dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self._num_steps = 0
        self._arrived: Tensor | None = None  # the flag as it was one interval ago, on the host
        self._skipped = torch.zeros((), dtype=torch.float64, device="cpu" if device.type == "mps" else device)

    def allows_step(self, norm: Tensor, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer is to step.

        An optimizer that takes a found-inf flag itself (the fused ones) is told on the device and always called. For
        others, ``skip`` costs one host sync a step.
        """
        if self.policy == "ignore":
            return True
        if self.policy == "count":
            self._skipped += ~torch.isfinite(norm)
            return True
        if self.policy == "raise":
            self._sum += norm
            self._look_one_interval_late()
            return True
        is_broken = ~torch.isfinite(norm)
        self._skipped += is_broken
        if takes_found_inf(optimizer):
            optimizer.found_inf = is_broken.to(torch.float32)  # type: ignore[attr-defined]
            return True
        return not bool(is_broken)

    def _look_one_interval_late(self) -> None:
        self._num_steps += 1
        if self._num_steps % _INTERVAL != 0:
            return
        if self._arrived is not None and not math.isfinite(float(self._arrived)):
            raise NonFiniteGradientError(_MESSAGE.format(f"the last {2 * _INTERVAL} steps"))
        self._arrived = torch.empty((), dtype=torch.float64, pin_memory=self._sum.is_cuda)
        self._arrived.copy_(self._sum, non_blocking=True)

    def raise_if_broken(self, where: str) -> None:
        """End the run if a gradient was not finite since the last look. Waits for the device: call it rarely.

        Raises:
            NonFiniteGradientError: The policy is ``raise`` and a norm was NaN or inf.
        """
        if self.policy == "raise" and not math.isfinite(float(self._sum)):
            raise NonFiniteGradientError(_MESSAGE.format(where))

    @property
    def counts(self) -> bool:
        """Whether steps may be skipped under this policy, and are counted."""
        return self.policy in ("skip", "count")

    def take_num_skipped(self) -> Tensor:
        """Return how many steps were skipped since the last call, float64, shape ``()``, and begin at 0 again."""
        skipped, self._skipped = self._skipped, torch.zeros_like(self._skipped)
        return skipped


def refuse_vanished_scale(scaler: torch.amp.GradScaler, policy: str, where: str) -> None:
    """End the run if a scaler has halved its scale so often that overflow cannot be the reason. Waits for the device.

    Raises:
        NonFiniteGradientError: The policy is ``raise`` and the scale fell below ``_SMALLEST_SCALE``.
    """
    if policy == "raise" and scaler.is_enabled() and (scale := scaler.get_scale()) < _SMALLEST_SCALE:
        raise NonFiniteGradientError(
            f"The fp16 loss scale must stay above {_SMALLEST_SCALE}, but is {scale:.1e} in {where}: step after step was "
            "skipped, so data or weights hold NaN. Look at the data, lower the learning rate, or use bf16."
        )


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer skips a step itself when a device flag says so (torch's fused optimizers)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
