"""What a training loop costs: our trainer with progress, metrics and logger on, a bare loop, Lightning and Accelerate.

    python benchmarks/loop.py [--steps 100] [--rounds 7] [--features 16] [--device cpu]

All of them train the same model on the same batches in memory with the same optimizer, one after the other in each
round; the table has the median of each and the median of its ratios to the bare loop of the same round. A peer that is
not installed is left out.
"""

import argparse
import contextlib
import io
import os
import statistics
import time
import warnings
from pathlib import Path

import torch

from srforge.distributed import setup_device
from srforge.sr import EDSR, l1
from srforge.training import LossLogger, Metrics, Objective, RunnerOptions, Trainer, TrainingRunner


def make_model(arguments):
    torch.manual_seed(0)
    return EDSR(scale=2, num_features=arguments.features, num_blocks=3)


def make_batches(arguments):
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.batch, 3, arguments.patch, arguments.patch)
    lr = [torch.rand(shape, generator=generator) for _ in range(8)]
    hr = [torch.rand(*shape[:2], 2 * arguments.patch, 2 * arguments.patch, generator=generator) for _ in range(8)]
    device = torch.device(arguments.device)
    return InMemory([{"lr": lr[i % 8].to(device), "hr": hr[i % 8].to(device)} for i in range(arguments.steps)])


class InMemory:
    """A loader that costs nothing; a list would mean several loaders to Lightning."""

    def __init__(self, batches):
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)


def synchronise(arguments):
    if arguments.device.startswith("cuda"):
        torch.cuda.synchronize()


def bare_loop(arguments, batches):
    model = make_model(arguments).to(arguments.device)
    optimizer = make_optimizer(model)

    def epoch():
        for batch in batches:
            loss = l1(model(batch["lr"]), batch["hr"]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return epoch


def ours(arguments, batches, **options):
    model, _ = setup_device(make_model(arguments), arguments.device)
    runner = TrainingRunner(
        model,
        make_optimizer(model),
        Objective({"l1": l1}),
        metrics=Metrics({"l1_again": l1}) if options.pop("metrics", False) else None,
        options=RunnerOptions(**options),
    )
    trainer = Trainer(runner, seed=0, hooks=[LossLogger()])
    trainer.train(1, batches)
    trainer.rehearse = lambda *_: None  # once a launch, however many epochs follow

    def epoch():
        trainer.train(trainer.epoch + 1, batches)

    return epoch


def lightning(arguments, batches):
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model(arguments)

        def training_step(self, batch):
            loss = l1(self.model(batch["lr"]), batch["hr"]).mean()
            self.log("l1", loss, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return make_optimizer(self.model)

    module = Module()

    def epoch():
        accelerator = "gpu" if arguments.device.startswith("cuda") else "cpu"
        trainer = LightningTrainer(
            max_epochs=1, accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False
        )
        trainer.fit(module, batches)

    return epoch


def accelerate(arguments, batches):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=arguments.device == "cpu")
    model = make_model(arguments)
    model, optimizer = accelerator.prepare(model, make_optimizer(model.to(arguments.device)))

    def epoch():
        for batch in batches:
            loss = l1(model(batch["lr"]), batch["hr"]).mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

    return epoch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 100), ("rounds", 7), ("features", 16), ("batch", 4), ("patch", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = make_batches(arguments)
    loops = {
        "bare loop": bare_loop,
        "bare loop again": bare_loop,
        "SR-Forge": ours,
        "SR-Forge, non_finite: ignore": lambda a, b: ours(a, b, non_finite="ignore"),
        "SR-Forge, a second metric": lambda a, b: ours(a, b, metrics=True),
        "Lightning": lightning,
        "Accelerate": accelerate,
    }
    warnings.simplefilter("ignore")
    epochs, times = {}, {}
    for name, make in loops.items():
        try:
            epochs[name] = make(arguments, batches)
        except ImportError as error:  # noqa: PERF203  # a handful of peers
            print(f"{name} is left out: {error}")
    with Path(os.devnull).open("w") as nowhere:
        for round_number in range(arguments.rounds + 1):
            for name, epoch in epochs.items():
                synchronise(arguments)
                with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(io.StringIO()):
                    start = time.process_time() if arguments.device == "cpu" else time.perf_counter()
                    epoch()
                    synchronise(arguments)
                    end = time.process_time() if arguments.device == "cpu" else time.perf_counter()
                if round_number > 0:  # the first one warms up
                    times.setdefault(name, []).append((end - start) / arguments.steps)
    print(f"\n{arguments.steps} steps, {arguments.rounds} rounds, {arguments.device}, batch {arguments.batch}")
    print(f"{'loop':<32} {'ms a step':>10} {'to bare':>8}")
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times["bare loop"], strict=True))
        print(f"{name:<32} {1e3 * statistics.median(seconds):>10.2f} {ratio:>8.3f}")


if __name__ == "__main__":
    main()
