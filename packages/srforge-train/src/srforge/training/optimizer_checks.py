"""Whether optimizers fit the model, the loop and the options they are given with: looked at once, where a loop is made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from srforge.distributed import ConfigurationError, get_active_strategy
from srforge.training.options import RunnerOptions


def refuse_unfit_optimizers(
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    options: RunnerOptions,
    schedules: Mapping[str, Any] | None = None,
) -> None:
    """Refuse optimizers that would train something else, or that a loop cannot step, and settings for none of them.

    Args:
        model: As ``setup_device`` returned it.
        optimizers: By name.
        options: Their ``max_norm`` may have values by optimizer.
        schedules: By optimizer; None: none.

    Raises:
        ConfigurationError: An optimizer has no parameter of the model, or with several ranks one that is not the
            model's; it needs a closure; its schedule is another one's; or a setting names no optimizer.
    """
    is_alone = get_active_strategy().world_size == 1
    own = {id(parameter) for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = [parameter for parameter in held if id(parameter) not in own]
        if strange and (len(strange) == len(held) or not is_alone):
            raise ConfigurationError(
                f"The optimizer {name!r} must have parameters of the model that setup_device returned, but {len(strange)} "
                f"of its {len(held)} are not: they would {'not be trained' if is_alone else 'differ between ranks'}. "
                "Build it from model.parameters(), after setup_device; a loss with weights of its own belongs into the model."
            )
        parameters = inspect.signature(optimizer.step).parameters
        if "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"The optimizer {name!r} must step without a closure, but {type(optimizer).__name__} evaluates the loss "
                "several times a step, which hooks and accumulation do not allow. Choose another one."
            )
        scheduler = getattr((schedules or {}).get(name), "scheduler", None)
        if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigurationError(
                f"The schedule of {name!r} must be of its optimizer, but its scheduler was built from another one, whose "
                "learning rates it would change. Build it from the optimizer that is given here."
            )
    by_name = {"max_norm": options.max_norm if isinstance(options.max_norm, Mapping) else {}, "schedules": schedules}
    for setting, values in by_name.items():
        if unknown := sorted(set(values or {}) - set(optimizers)):
            raise ConfigurationError(
                f"`{setting}` must name optimizers ({', '.join(optimizers)}), but names {', '.join(unknown)}, which would "
                "have no effect. Correct the name."
            )
