"""What ranks do in the tests of sharding: train, evaluate and end uneven data sets, in real processes."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from fleet_cases import seeded, start
from srforge.distributed import (
    MetricSum,
    ShardedBatchSampler,
    ShardedIterable,
    ShardedSampler,
    TrainingStrategy,
    begin_epoch,
    gather_in_order,
    get_active_strategy,
    plan_of,
    rehearse,
    resolve_seed,
    stop_together,
)

GLOBAL_BATCH, BATCHES_PER_STEP, SEED = 24, 12, 7
# full steps only; a tail of 5 (uneven ranks), of 2 (ranks without a sample); fewer samples than ranks; repeated passes
TRAININGS: list[dict[str, Any]] = [
    {"num_samples": 48},
    {"num_samples": 53},
    {"num_samples": 50},
    {"num_samples": 50, "accumulate": 2},
    {"num_samples": 39, "accumulate": 2},
    {"num_samples": 1},
    {"num_samples": 11, "repeat": 3},
    {"num_samples": 50, "filler": 2},
    {"num_samples": 10, "steps_per_epoch": 2},
    {"num_samples": 50, "tail": "pad"},
    {"num_samples": 50, "tail": "drop"},
    {"num_samples": 50, "weights": True},
]
EVALUATED = (0, 1, 5, 97, 99, 100, 101)


class Samples(torch.utils.data.Dataset):
    """Points and targets, float64; counts which ones were asked for."""

    def __init__(self, length: int) -> None:
        self.points = seeded(length, 3, seed=1).double()
        self.targets = self.points.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.targets[index]


class Lengths(BatchSampler):
    """A user's batch sampler: shuffled samples in batches of 1 to 3."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(RandomSampler(range(num_samples)), 3, drop_last=False)
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[list[int]]:
        sampler = iter(self.sampler)
        for number in range(len(self)):
            yield list(itertools.islice(sampler, 1 + number % 3))

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, 6)
        return 3 * full + (rest > 0) + (rest > 1) + (rest > 3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def train(loader: DataLoader[Any], num_epochs: int) -> list[list[float]]:
    """Train as a hand-written loop does, and return each parameter."""
    strategy = get_active_strategy()
    model = strategy.prepare(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = torch.utils.data.default_collate([loader.dataset[0]])
    rehearse(model, lambda: loss_of(model, first).backward())
    for epoch in range(num_epochs):
        begin_epoch(epoch, SEED, loader)
        plan = plan_of(loader)
        for number, batch in enumerate(loader):
            if plan.ends_window(number):
                (plan.loss_scale(number, strategy.rank) * loss_of(model, batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with strategy.no_sync(model):
                    (plan.loss_scale(number, strategy.rank) * loss_of(model, batch)).backward()
        assert number + 1 == plan.num_micro_batches
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def train_alone(dataset: Samples, epochs: list[list[list[int]]]) -> list[list[float]]:
    """The oracle: the bare model, each step the plain mean over its samples at once."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for steps in epochs:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, torch.utils.data.default_collate([dataset[index] for index in step])).backward()
            optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def largest_difference(first: list[list[float]], second: list[list[float]]) -> float:
    pairs = zip(itertools.chain(*first), itertools.chain(*second), strict=True)
    return max(abs(a - b) for a, b in pairs)


def rank_trains() -> list[float]:
    """Differences from the oracle after 3 epochs, one for each kind of training."""
    strategy, errors = start(), []
    for training in TRAININGS:
        dataset = Samples(training["num_samples"])
        options = {key: value for key, value in training.items() if key != "num_samples"}
        if options.get("weights"):
            options["weights"] = [index % 3 for index in range(len(dataset))]
        batch_size = GLOBAL_BATCH // strategy.world_size // options.get("accumulate", 1)
        sampler = strategy.make_sampler(
            len(dataset), batch_size=batch_size, shuffle=True, training=True, seed=SEED, **options
        )
        options.pop("accumulate", None)
        alone = ShardedSampler(
            dataset, rank=0, world_size=1, batch_size=GLOBAL_BATCH, shuffle=True, training=True, seed=SEED, **options
        )
        epochs = []
        for epoch in range(3):
            alone.set_epoch(epoch)
            keys = list(alone)
            epochs.append([keys[start : start + GLOBAL_BATCH] for start in range(0, len(keys), GLOBAL_BATCH)])
        weights = train(DataLoader(dataset, batch_size, sampler=sampler), 3)
        errors.append(largest_difference(weights, train_alone(dataset, epochs)))
    return errors


def rank_trains_on_own_batches() -> list[float]:
    """Differences from the oracle after 3 epochs of own batches, for several lengths of the last step."""
    strategy, errors = start(), []
    for num_samples in (48, 53, 25, 3):
        dataset = Samples(num_samples)
        accumulate = BATCHES_PER_STEP // strategy.world_size
        sampler = ShardedBatchSampler(Lengths(num_samples), training=True, seed=SEED, accumulate=accumulate)
        epochs = []
        for epoch in range(3):
            alone = ShardedBatchSampler(Lengths(num_samples), training=False, seed=SEED, rank=0, world_size=1)
            alone.set_epoch(epoch)
            batches = list(alone)
            assert sorted(itertools.chain(*batches)) == list(range(num_samples))
            starts = range(0, len(batches), BATCHES_PER_STEP)
            epochs.append([list(itertools.chain(*batches[start : start + BATCHES_PER_STEP])) for start in starts])
        weights = train(DataLoader(dataset, batch_sampler=sampler), 3)
        errors.append(largest_difference(weights, train_alone(dataset, epochs)))
    return errors


def rank_evaluates() -> list[tuple[dict[str, Any], list[float]]]:
    """The mean over a data set of values 0, 1, 2..., and all predictions in order, for several lengths."""
    strategy, results = start(), []
    for length in EVALUATED:
        sampler = strategy.make_sampler(length, batch_size=8, shuffle=False, training=False, seed=SEED)
        values = [float(value) for batch in DataLoader(range(length), 8, sampler=sampler) for value in batch]
        reduced = strategy.reduce_metrics({"mean": MetricSum(sum(values), len(values))})
        results.append((reduced, gather_in_order(values, list(sampler), num_samples=length)))
    return results


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        random.random()
        return iter(range(self.length))


def rank_ends_uneven(lengths: list[int]) -> dict[str, Any]:
    """Batches that this rank trained on, when its own data set has another length than the others'."""
    strategy = start()
    model = strategy.prepare(network())
    own = DataLoader(Stream(lengths[strategy.rank]), batch_size=None)
    trained = []
    for epoch in range(2):
        begin_epoch(epoch, SEED, own)
        for element in stop_together(own, strategy):
            model(torch.full((1, 3), float(element), dtype=torch.float64)).sum().backward()  # a collective a step
            trained.append(int(element))
    sharded = ShardedIterable(Stream(10 * strategy.world_size + 1), seed=SEED)
    shared = [int(element) for element in stop_together(DataLoader(sharded, batch_size=None), strategy)]
    return {"trained": trained, "shared": shared, "after": strategy.all_gather(torch.tensor(strategy.rank)).tolist()}


def rank_fails_to_read(failing: int) -> str:
    strategy: TrainingStrategy = start()

    def batches() -> Iterator[int]:
        yield 0
        if strategy.rank == failing:
            raise OSError("disk gone")
        yield from range(1, 5)

    try:
        list(stop_together(batches(), strategy))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "no error"


def rank_draws_a_seed() -> tuple[int, int]:
    strategy = start()
    return resolve_seed(None, strategy), resolve_seed(5, strategy)


def rank_of_a_thousand(rank: int) -> dict[str, Any]:
    """A sampler of a fleet of 1,024 whose process group answers without peers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    sampler = ShardedSampler(10**9, batch_size=16, shuffle=True, training=True, seed=SEED)
    evaluation = ShardedSampler(10**9, batch_size=16, shuffle=False, training=False, seed=SEED)
    return {
        "rank": (sampler.rank, sampler.world_size),
        "first": [int(key) for key in itertools.islice(sampler, 32)],
        "lengths": (len(sampler), len(evaluation)),
        "start": int(next(iter(evaluation))),
    }
