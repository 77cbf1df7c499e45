"""The outermost wrapper of a data set: each sample drawn from (seed, epoch, index), each epoch announced.

Because the seed of a sample depends on nothing else, augmentation is the same for any number of workers and ranks,
with living or new workers, and after a resume. Data sets without indices are ``ShardedIterable``'s business.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from srforge.distributed.errors import SRForgeError
from srforge.distributed.seeding import mix, preserved_rng, seed_sample
from srforge.distributed.sharding import SampleKey

_COLLATE = 0x63  # keeps the seed of a batch apart from those of its samples


class SampleError(RuntimeError):
    """A data set failed to make a sample; says which one, on which rank and in which worker, and why."""


class SampleConfigurationError(SampleError, SRForgeError):
    """As ``SampleError``, where the reason is one of SR-Forge's own errors: it says all there is to know in one line."""


class SeededDataset(Dataset[Any]):
    """Seeds python, numpy and torch before each sample, and tells the data set the epoch, also in living workers.

    In the main process (no workers) the global generators are restored after each sample: the model's dropout does
    not depend on the number of workers.

    A data set's ``__getitems__`` is not used, because samples made together would share one seed, unless the data set
    has an attribute ``accepts_sample_keys = True``: it then gets the batch's ``SampleKey`` list, with the generators
    seeded for the first one, and may call ``seed_sample(seed, key.epoch, key)`` itself.

    Args:
        dataset: A map-style data set. If it has ``set_epoch(epoch)``, or holds data sets that have, they are told
            each epoch in the process that makes the samples.
        seed: The run's seed.
        rank: This process's rank; for messages only.
    """

    def __init__(self, dataset: Any, seed: int, *, rank: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        self.rank = rank
        self.last_key: int | None = None
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        return self._seeded(key, key, lambda: _take(self.dataset, key))

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], Any] | None:
        """How a loader fetches a whole batch; None (one by one) unless the data set opted in."""
        if not getattr(self.dataset, "accepts_sample_keys", False):
            return None
        return lambda keys: self._seeded(keys[0], list(keys), lambda: self.dataset.__getitems__(list(keys)))

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set the epoch, once per epoch and process.

        Args:
            epoch: 0-based epoch.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            announce_epoch(self.dataset, epoch)

    def _seeded(self, key: Any, asked: Any, make: Callable[[], Any]) -> Any:
        first = key[0] if isinstance(key, list | tuple) and key else key  # a sampler of lists, batch_size=None
        epoch = getattr(first, "epoch", None)
        if epoch is not None:
            self.set_epoch(epoch)
        self.last_key = first
        with rng_of_process():
            seed_sample(self.seed, epoch or 0, first)
            try:
                return make()
            except (Exception, SystemExit) as error:
                # In a worker an exit would be the end without a word: its rank sees a pipe that closed.
                is_exit_here = isinstance(error, SystemExit) and get_worker_info() is None
                if epoch is None or is_exit_here:  # None: asked for by hand, not by a loader
                    raise
                kind = SampleConfigurationError if isinstance(error, SRForgeError) else SampleError
                raise kind(
                    f"sample {asked} (epoch {epoch}) must be readable, but its data set failed on rank {self.rank}, "
                    f"{_process_name()}: {type(error).__name__}: {error}"
                ) from error


class SeededCollate:
    """Runs a user's ``collate_fn`` with seeded generators, as the samples were: mixing may be random too.

    Args:
        collate: The user's function, from a list of samples to a batch.
        dataset: The loader's data set, which knows the last sample's key.
    """

    def __init__(self, collate: Callable[[Any], Any], dataset: SeededDataset) -> None:
        self.collate = collate
        self.dataset = dataset

    def __call__(self, samples: Any) -> Any:
        """Collate a batch, seeded by its last sample.

        Args:
            samples: What the user's function takes: a list of samples.

        Returns:
            The user's batch.
        """
        key = self.dataset.last_key
        with rng_of_process():
            if key is not None:
                seed_sample(mix(self.dataset.seed, _COLLATE), getattr(key, "epoch", 0), key)
            return self.collate(samples)


def rng_of_process() -> AbstractContextManager[None]:
    """Return what restores the global generators in the main process, where the model draws from them too."""
    return preserved_rng() if get_worker_info() is None else nullcontext()


def announce_epoch(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` on a data set, or on the data sets inside a subset or a concatenation.

    Args:
        dataset: Any data set.
        epoch: 0-based epoch.
    """
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
        return
    for _, inner in inner_datasets(dataset):
        announce_epoch(inner, epoch)


def inner_datasets(dataset: Any) -> list[tuple[str, Any]]:
    """Return the data sets that a subset (``dataset``) or a concatenation (``datasets``) holds, each under its path."""
    one, several = getattr(dataset, "dataset", None), getattr(dataset, "datasets", ())
    found = [] if one is None or one is dataset else [(".dataset", one)]
    if isinstance(several, list | tuple):
        found += [(f".datasets[{position}]", inner) for position, inner in enumerate(several)]
    return found


def _take(dataset: Any, key: Any) -> Any:
    index = int(key) if isinstance(key, SampleKey) else key
    if type(dataset).__getitem__ is Dataset.__getitem__ and hasattr(dataset, "__getitems__"):
        return dataset.__getitems__([index])[0]  # makes whole batches only
    return dataset[index]


def _process_name() -> str:
    worker = get_worker_info()
    return "main process" if worker is None else f"worker {worker.id}"
