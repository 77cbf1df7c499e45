"""The start of an epoch: seeds of this process, and the epoch's number for everything that orders or makes samples."""

from typing import Any

from srforge.distributed.active import get_active_strategy
from srforge.distributed.breadcrumbs import note_place
from srforge.distributed.seeding import seed_epoch


def begin_epoch(epoch: int, seed: int, *loaders: Any) -> None:
    """Seed this process for an epoch and tell the epoch to every sampler, batch sampler and data set.

    Args:
        epoch: 0-based epoch.
        seed: The run's seed.
        *loaders: Loaders, or None for one that is not there. ``set_epoch`` is called once on each object that has it:
            the loader, its sampler, its batch sampler and the sampler inside that, its data set.
    """
    note_place("start of the epoch", epoch)
    seed_epoch(seed, epoch, get_active_strategy().rank)
    told: set[int] = set()
    for loader in loaders:
        batch_sampler = getattr(loader, "batch_sampler", None)
        for target in (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        ):
            set_epoch = getattr(target, "set_epoch", None)
            if callable(set_epoch) and id(target) not in told:
                told.add(id(target))
                set_epoch(epoch)
