"""The contract of every training strategy: what changes when the same script runs on one device or on many.

A strategy implements the primitives (group, wrapping, four ways to exchange values); everything else is built on them
here, once, so that a stand-in for tests needs the primitives only.
"""

import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from srforge.distributed import buffers as buffer_sync
from srforge.distributed import replicas
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.options import DistributedOptions
from srforge.distributed.packing import flatten, named_tensors, packs, unflatten
from srforge.distributed.parts import (
    declared_parts,
    is_compiled,
    refuse_stray_parameters,
    unwrap_module,
    wrapped_name,
)
from srforge.distributed.reductions import ReductionReport, reduce_metrics
from srforge.distributed.sharding import ShardedSampler
from srforge.distributed.topology import Topology


class TrainingStrategy(ABC):
    """How one process takes part in training.

    Attributes:
        topology: Place of the process in the fleet.
        options: The options in force.
        device: The device that this process trains on (of several: the first).
        name: ``single``, ``data_parallel`` or ``ddp``.
        reason: Why this strategy was chosen, in words.
        last_reduction: Report of the last ``reduce_metrics``; None before it.
    """

    name: str = ""

    def __init__(self, topology: Topology, device: torch.device, options: DistributedOptions | None = None) -> None:
        self.topology = topology
        self.device = device
        self.options = DistributedOptions() if options is None else options
        self.reason = ""
        self.last_reduction: ReductionReport | None = None
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def rank(self) -> int:
        """Rank of this process, ``0 <= rank < world_size``."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self.topology.world_size

    @property
    def is_main(self) -> bool:
        """This process is rank 0, the one that has side effects."""
        return self.topology.rank == 0

    # Primitives.

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, shape ``(world_size, *shape)``, in rank order, on the tensor's device.

        Collective: every rank must call, with one shape and dtype.
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value (small, picklable) in rank order.

        Collective: every rank must call.
        """

    @abstractmethod
    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the value (picklable) of rank ``source``.

        Collective: every rank must call.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here.

        Collective: every rank must call.
        """

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of rank ``source``; ``tensor`` itself may be overwritten with it.

        Collective: every rank must call, with one shape and dtype.
        """
        return tensor if self.world_size == 1 else self.all_gather(tensor)[source]

    # Group and model.

    def setup(self) -> None:  # noqa: B027 - one process needs no group
        """Open the process group, if the strategy needs one. Idempotent."""

    def teardown(self) -> None:  # noqa: B027 - see setup
        """Close the process group, if ``setup`` opened one. Idempotent."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, give every rank rank 0's weights, and wrap each trainable part.

        Args:
            model: The bare model. A composite has ``trainable_modules() -> {attribute: module}``: each of these is
                wrapped and set back under its attribute; what the wrapper hides (other attributes of the part) is
                reached through ``unwrap``.

        Returns:
            The model to train with: a composite itself, a plain model in its wrapper.

        Raises:
            ConfigurationError: A trainable parameter is in no part or in two, or the model is wrapped already.
            ReplicaDivergenceError: The ranks built different models.

        Collective: every rank must call.
        """
        if self.is_prepared(model):
            return model
        self._refuse_wrapped(model)
        named_tensors(model)  # refuses, by name, what cannot be sent or compared
        model = self._convert(model)
        parts = declared_parts(model)
        refuse_stray_parameters(model, parts)
        model.to(self.device)
        self._replicate(model)
        prepared = self._wrap(model, parts)
        self._prepared.add(prepared)
        return prepared

    def _refuse_wrapped(self, model: nn.Module) -> None:
        """Refuse a model whose wrappers are not ours."""
        for name, module in model.named_modules():
            if wrapped_name(module) is not None and (self.world_size > 1 or not is_compiled(module)):
                where = f"model.{name}" if name else "model"
                raise ConfigurationError(
                    f"`{where}` must be a bare module, but is {type(module).__name__}. Pass the bare model to "
                    "setup_device, which wraps it; compile what setup_device returns."
                )

    def _convert(self, model: nn.Module) -> nn.Module:
        """Return the model with layers exchanged as the options ask."""
        return model

    def _replicate(self, model: nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers, in a few packed broadcasts."""
        if self.world_size == 1:
            return
        named = named_tensors(model)
        replicas.refuse_different_structures(named, self.all_gather, self.all_gather_object)
        for pack in packs(tensor for _, tensor in named):
            unflatten(self.broadcast(flatten(pack)), pack)

    def _wrap(self, model: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:  # noqa: ARG002 - for strategies that wrap
        """Return the model with its parts wrapped."""
        return model

    def is_prepared(self, model: nn.Module) -> bool:
        """Say whether this strategy returned ``model`` from ``prepare``, or it is ``torch.compile`` of that."""
        while model not in self._prepared and is_compiled(model):
            model = model._modules["_orig_mod"]  # type: ignore[assignment]  # noqa: SLF001 - past the compiler's attribute forwarding
        return model in self._prepared

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the bare module of a wrapped model or part, compiled or not."""
        return unwrap_module(module)

    def trainable_parts(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return attribute -> (wrapped) part of a composite; ``{"": model}`` for a plain model."""
        bare = unwrap_module(model)
        method = getattr(bare, "trainable_modules", None)
        return {name: bare.get_submodule(name) for name in method()} if callable(method) else {"": model}

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - for strategies that sync
        """Return a context in which backward passes keep gradients local, in all parts; forward belongs inside too."""
        return nullcontext()

    def refuse_unfinished_sync(self, model: nn.Module) -> None:  # noqa: B027 - for strategies that sync
        """Refuse a backward pass after which the gradients of a part are not synced; call it right after one.

        Raises:
            RuntimeError: The wrapper still waits for parameters; ``explained_errors`` says which and what cures it.
        """

    @contextmanager
    def explained_errors(self, model: nn.Module) -> Iterator[None]:  # noqa: ARG002 - for strategies that wrap
        """Raise the wrappers' own errors again with parameter names and the option that cures them.

        Raises:
            ConfigurationError: The model's graph is at odds with an option.
        """
        yield

    # What follows is built on the primitives.

    def make_sampler(
        self,
        num_samples: int,
        *,
        batch_size: int,
        shuffle: bool,
        training: bool,
        seed: int,
        **plan_options: Any,
    ) -> ShardedSampler:
        """Return this rank's sampler; ``plan_options`` go to ``ShardedSampler``."""
        return ShardedSampler(
            num_samples,
            world_size=self.world_size,
            rank=self.rank,
            batch_size=batch_size,
            shuffle=shuffle,
            training=training,
            seed=seed,
            **plan_options,
        )

    def sync_buffers(self, model: nn.Module) -> None:
        """Average BatchNorm's running statistics over the ranks; make every other buffer rank 0's.

        Collective: every rank must call.
        """
        if self.world_size > 1:
            buffer_sync.sync_buffers(model, self.all_gather, self.broadcast)

    def check_replicas(self, model: nn.Module, *, buffers: bool = True) -> None:
        """Compare the replicas of the model, unless ``options.check_replicas`` is false.

        Raises:
            ReplicaDivergenceError: On every rank, if parameters (or ``buffers``) differ.

        Collective: every rank must call.
        """
        if self.world_size > 1 and self.options.check_replicas:
            replicas.check_replicas(model, self.all_gather, self.all_gather_object, buffers=buffers)

    def fingerprint(self, model: nn.Module) -> str:
        """Return 32 hexadecimal digits that stand for this rank's parameters and buffers."""
        halves = replicas.fingerprint(tensor for _, tensor in named_tensors(model)).tolist()
        return "".join(f"{half % 2**64:016x}" for half in halves)

    def reduce_metrics(self, tree: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the fleet's value of each metric; the report stays in ``last_reduction``.

        Args:
            tree: Nested mapping with ``MetricSum`` leaves.

        Returns:
            The same nesting with float leaves, the same on every rank.

        Collective: every rank must call. Two collectives when the ranks' keys agree.
        """
        reduced, self.last_reduction = reduce_metrics(tree, self.all_gather)
        return reduced

    def abort(self, exit_code: int) -> NoReturn:
        """End this process at once, without clean-up that another rank's absence could block."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
