"""What each rank does in the tests of reductions."""

import math
import random
from functools import partial

from harness import asked_backend, asked_device

SAMPLE_COUNTS = (0, 1, 5, 7, 8, 97)
EVALUATED = (1, 5, 97, 99, 100, 101)
BANDS = ("B02", "B03", "B04", "B8A")


def samples_of(num_samples):
    """The values of a metric per band and sample: the same in the test and on every rank."""
    generator = random.Random(num_samples)
    return {band: [generator.gauss(30, 5) for _ in range(num_samples)] for band in BANDS}


def start():
    import torch

    from srforge.distributed import get_active_strategy, setup_device

    setup_device(torch.nn.Linear(1, 1), asked_device(), options={"backend": asked_backend()})
    return get_active_strategy()


def counted(call):
    """What a call returns, and the number of collectives that torch's process groups carried out for it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = call()
    return result, sum(event.name.startswith("c10d::") for event in profiler.events())


def rank_reduces_every_size():
    """Per number of samples: what the fleet reduced, and the collectives that this took."""
    import torch

    from srforge.distributed import MetricSum

    strategy = start()
    results = []
    for num_samples in SAMPLE_COUNTS:
        samples = samples_of(num_samples)
        own = {band: samples[band][strategy.rank :: strategy.world_size] for band in BANDS}
        count = len(own["B02"])
        bands = list(BANDS)
        random.Random(strategy.rank).shuffle(bands)  # another order on every rank
        device = strategy.device
        psnr = {b: MetricSum(torch.tensor(own[b], dtype=torch.float64, device=device).sum(), count) for b in bands}
        validation = {"psnr": psnr, "count": MetricSum(count, torch.tensor(count, device=device), "sum")}
        training = {
            "low": MetricSum(min(own["B03"], default=math.inf), count, "min"),
            "high": MetricSum(max(own["B03"], default=-math.inf), count, "max"),
        }
        groups = [("training", training), ("validation", validation)]
        tree = dict(groups if strategy.rank % 2 else reversed(groups))
        results.append(counted(partial(strategy.reduce_metrics, tree)))
    return results, [evaluate(strategy, num_samples) for num_samples in EVALUATED]


def evaluate(strategy, num_samples):
    """The samples' numbers as predicted by an unpadded evaluation in batches of 8, and their mean over the fleet."""
    import torch

    from srforge.distributed import MetricSum, gather_in_order

    sampler = strategy.make_sampler(num_samples, batch_size=8, shuffle=False, training=False, seed=0)
    loader = torch.utils.data.DataLoader(torch.arange(num_samples), batch_size=8, sampler=sampler)
    predictions = [value for batch in loader for value in batch]
    total = float(sum(predictions))
    mean = strategy.reduce_metrics({"value": MetricSum(total, len(predictions))})["value"]
    return [int(value) for value in gather_in_order(predictions, list(sampler), num_samples=num_samples)], mean


def rank_meets_every_difference():
    """The cases in which ranks differ, one after another: none may hang or mix keys."""
    import torch

    from srforge.distributed import CollectiveError, ConfigurationError, MetricSum, gather_in_order

    strategy = start()
    rank = strategy.rank
    seen = {}

    # Integer counts, unequal shares: 13 / 7.
    seen["unequal"] = strategy.reduce_metrics({"m": MetricSum((5.0, 8.0)[rank], (5, 2)[rank])})["m"]
    # A key on one rank only, and a rank without anything.
    seen["one_rank_only"] = strategy.reduce_metrics({"a": MetricSum(6.0, 3)} if rank else {})
    seen["missing"] = strategy.last_reduction.missing
    # The epoch's loss on all ranks and an own metric reduced at the epoch's end, in another order on rank 1.
    trees = [("loss", MetricSum(1.0 + rank, 1)), ("own", {"fid": MetricSum(10.0 * rank, 2)})]
    seen["order"] = strategy.reduce_metrics(dict(trees[:: 1 - 2 * rank]))
    seen["integers"] = strategy.reduce_metrics({"n": MetricSum(2**52 - rank, 1, "sum")})["n"]
    strategy.reduce_metrics({"m": MetricSum(torch.tensor((1.0, math.nan)[rank]), 1)})
    seen["non_finite"] = strategy.last_reduction.non_finite
    seen["empty"] = strategy.reduce_metrics({"m": MetricSum(0.0, 0)})
    for name, tree in (
        ("conflict", {"m": MetricSum(1.0, 1, ("mean", "sum")[rank])}),
        ("malformed", {"m": (MetricSum(1.0, 1), "three")[rank]}),
    ):
        try:
            strategy.reduce_metrics(tree)
        except (CollectiveError, ConfigurationError) as error:  # noqa: PERF203 - two cases
            seen[name] = str(error)
    # Predictions for 101 samples in batches of 8, dealt batch by batch.
    own = [index for index in range(101) if index // 8 % 2 == rank]
    seen["gathered"] = gather_in_order([index / 2 for index in own], own, num_samples=101)
    # Still in step after all of it.
    seen["after"] = strategy.reduce_metrics({"m": MetricSum(float(rank), 1)})
    return seen


def rank_decides():
    """Three epochs with a monitored value that differs per rank; a scheduler stepped in the loop."""
    import torch

    from srforge.distributed import MetricSum

    strategy = start()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    best, kept = math.inf, []
    monitored = [[3.0, 1.0], [1.0, 4.0], [2.0, 1.5]]  # rank 0 alone would keep epochs 0 and 1, rank 1 alone only 0
    for epoch in range(3):
        for _ in range(2):
            optimizer.step()
            scheduler.step()
        value = strategy.reduce_metrics({"loss": MetricSum(monitored[epoch][strategy.rank], 1)})["loss"]
        if value < best:
            best = value
            kept.append(epoch)
    return kept, best, scheduler.last_epoch


def rank_dies_before_reducing():
    from srforge.distributed import MetricSum

    strategy = start()
    if strategy.rank == 1:
        raise ValueError("rank 1 has had enough")
    strategy.reduce_metrics({"m": MetricSum(1.0, 1)})
