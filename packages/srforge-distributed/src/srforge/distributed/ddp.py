"""One process per device: ``DistributedDataParallel`` around each trainable part, gradients all-reduced."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from srforge.distributed.breadcrumbs import start_reporting, stop_reporting
from srforge.distributed.ddp_errors import explained_ddp_errors
from srforge.distributed.errors import CollectiveError, ConfigurationError
from srforge.distributed.gate_scope import refuse_inside_gate
from srforge.distributed.options import DistributedOptions
from srforge.distributed.parts import has_trainable_parameters, reducers, replace_part
from srforge.distributed.rendezvous import open_process_group
from srforge.distributed.strategy import TrainingStrategy
from srforge.distributed.topology import Topology

_KNOWN_TO_DDP = inspect.signature(DistributedDataParallel.__init__).parameters
#: The argument that switches DDP's buffer broadcasts; newer versions of torch renamed it.
_BUFFER_BROADCASTS = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN_TO_DDP else "broadcast_buffers"


class DDPStrategy(TrainingStrategy):
    """Training with one process per device; each owns a shard of the data and a replica of the model.

    Attributes:
        backend: ``nccl`` or ``gloo``.
    """

    name = "ddp"

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        options: DistributedOptions | None = None,
        *,
        backend: str = "gloo",
    ) -> None:
        super().__init__(topology, device, options)
        if self.options.gradient_compression == "bf16" and backend != "nccl":
            raise ConfigurationError(
                f"`gradient_compression` must be fp16 or none with {backend}, but is bf16: torch sends bf16 gradients "
                "through NCCL only. Choose one of these."
            )
        self.backend = backend
        self._owns_group = False

    def setup(self) -> None:
        """Open the process group, or adopt the one that exists. Idempotent.

        Collective: every rank must call.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if dist.is_initialized():
            return
        facts = {f"`{name}`": value for name, value in vars(self.options).items()}
        open_process_group(self.topology, self.backend, self.device, self.options.timeout_minutes, facts)
        self._owns_group = True
        if self.world_size > 1:
            start_reporting(dist.distributed_c10d._get_default_store(), self.rank, self.world_size)  # noqa: SLF001  # no public way to the store that every rank shares

    def teardown(self) -> None:
        """Close the process group if this strategy opened it."""
        if self._owns_group and dist.is_initialized():
            stop_reporting()
            dist.destroy_process_group()
        self._owns_group = False

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, ``(world_size, *shape)``, as bytes on the wire: any type, bit for bit."""
        tensor = tensor.detach()
        local = self._on_wire(tensor)
        gathered = torch.empty(self.world_size * local.numel(), dtype=torch.uint8, device=local.device)
        if local.numel():
            with self._collective("all_gather"):
                # Newer versions of torch renamed it.
                gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                gather(gathered, local)
        return gathered.to(tensor.device).view(tensor.dtype).reshape(self.world_size, *tensor.shape)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return the tensor of rank ``source``."""
        tensor = tensor.detach()
        local = self._on_wire(tensor)
        with self._collective("broadcast"):
            dist.broadcast(local, src=source)
        return local.to(tensor.device).view(tensor.dtype).reshape(tensor.shape)

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """Return a tensor's bytes, shape ``(n,)``, on a device that the backend can send from."""
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if self.backend == "nccl":
            flat = flat.to(self.device)
        return flat.view(torch.uint8)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order."""
        values: list[Any] = [None] * self.world_size
        with self._collective("all_gather_object"):
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the value of rank ``source``."""
        values = [value if self.rank == source else None]
        with self._collective("broadcast_object"):
            dist.broadcast_object_list(values, src=source, device=self.device if self.backend == "nccl" else None)
        return values[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self._collective("barrier"):
            dist.barrier(device_ids=[self.device.index] if self.backend == "nccl" else None)

    @contextmanager
    def _collective(self, operation: str) -> Iterator[None]:
        """Refuse a collective where it would hang, and say in our words that it failed.

        Raises:
            CollectiveError: Only rank 0 is here (inside a gate), a peer is gone, or the time is up.
        """
        refuse_inside_gate(operation)
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CollectiveError(
                f"`{operation}` must be reached by every rank within `timeout_minutes`={self.options.timeout_minutes:g}, "
                f"but failed on rank {self.rank}: {first_line}. Look for the first error in the other ranks' output."
            ) from error

    def _convert(self, model: nn.Module) -> nn.Module:
        if not self.options.sync_batchnorm:
            return model
        if self.device.type != "cuda":
            raise ConfigurationError(
                f"`sync_batchnorm` must be false on {self.device.type}, but is true: torch's SyncBatchNorm runs on "
                "CUDA tensors only. Set it to false, or train on CUDA devices."
            )
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            warnings.warn("`sync_batchnorm` has no effect: the model has no BatchNorm layer. Remove it.", stacklevel=4)
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted

    def _wrap(self, model: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
        for name, part in parts.items():
            if not has_trainable_parameters(part):
                continue  # moved and broadcast; DDP refuses a module without gradients
            wrapped = self._wrap_part(part)
            if name == "":
                return wrapped
            replace_part(model, name, wrapped)
        return model

    def _wrap_part(self, part: nn.Module) -> DistributedDataParallel:
        options = self.options
        arguments: dict[str, Any] = {_BUFFER_BROADCASTS: False}
        wrapped = DistributedDataParallel(
            part,
            gradient_as_bucket_view=True,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters and not options.static_graph,
            init_sync=False,  # `_replicate` sent parameters and buffers; DDP would send no buffers
            **arguments,
        )
        if options.gradient_compression != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            wrapped.register_comm_hook(None, hooks[options.gradient_compression])
        return wrapped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes keep gradients local, in all parts; forward belongs inside too."""
        return self._no_sync(model)

    @contextmanager
    def _no_sync(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for part in reducers(model):
                stack.enter_context(part.no_sync())
            yield

    def refuse_unfinished_sync(self, model: nn.Module) -> None:
        """Refuse a backward pass after which a reducer still waits: by itself DDP says so one forward later."""
        for part in reducers(model):
            part.reducer._rebuild_buckets()  # noqa: SLF001 - what DDP's forward calls; nothing to rebuild between steps

    @contextmanager
    def explained_errors(self, model: nn.Module) -> Iterator[None]:
        """Raise DDP's own errors again with parameter names and the option that cures them."""
        with explained_ddp_errors(model, static_graph=self.options.static_graph):
            yield
