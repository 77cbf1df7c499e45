"""Adversarial training on fleets by the runner itself, against one process that runs every rank's micro-batches.

The oracle is a plain loop in torch: it forwards each rank's share from the same state of spectral norm, joins the logits
of all ranks where a criterion wants means over the fleet, and takes gradients by ``torch.autograd.grad``.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from fleet_cases import start
from srforge.distributed import ShardedSampler, get_active_strategy, plain_state_dict, set_active_strategy
from srforge.training import (
    AdversarialTerm,
    CheckpointStore,
    DiscriminatorWarmup,
    ExponentialMovingAverage,
    GANModel,
    GANRunner,
    Hinge,
    Hook,
    Objective,
    R1Penalty,
    Relativistic,
    RelativisticAverage,
    StepRatio,
    Trainer,
    Vanilla,
    hooks_into,
)

BATCH, EPOCHS, WEIGHT, GAMMA, RATES = 2, 2, 0.3, 0.7, (0.05, 0.03)
CRITERIA = {
    "vanilla": Vanilla,
    "hinge": Hinge,
    "relativistic": Relativistic,
    "relativistic average": RelativisticAverage,
}
PENALTY_INTERVAL = 2
TURNS = {
    "together": None,
    "generator every second step": StepRatio(generator_every=2),
    "generator first": DiscriminatorWarmup(1),
}


class Pictures(Dataset[dict[str, Tensor]]):
    """Noise, 3 x 6 x 6, float64: sums are exact enough to compare."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.lr = torch.randn(num_samples, 3, 6, 6, generator=generator, dtype=torch.float64)
        self.hr = self.lr.flip(-1) * 0.5 + 0.2

    def __len__(self) -> int:
        return len(self.lr)

    def __getitem__(self, key: int) -> dict[str, Tensor]:
        return {"lr": self.lr[key], "hr": self.hr[key]}


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean(dim=(1, 2, 3))


def make_model(norm: str) -> GANModel:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1))
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3)]
    if norm in ("batch", "instance"):
        layers.insert(1, nn.BatchNorm2d(4) if norm == "batch" else nn.InstanceNorm2d(4, affine=True))
    if norm.startswith("spectral"):
        by_hook = norm == "spectral by hook"
        wrap = nn.utils.spectral_norm if by_hook else nn.utils.parametrizations.spectral_norm
        layers = [wrap(layer) if isinstance(layer, nn.Conv2d) else layer for layer in layers]
    return GANModel(generator, nn.Sequential(*layers)).double()


def sampler_of(case: dict[str, Any], world_size: int, rank: int) -> ShardedSampler:
    """Two steps an epoch; the second is one sample, so that every rank but the first only repeats it."""
    num_samples = BATCH * world_size * case["accumulate"] + 1
    return ShardedSampler(
        num_samples,
        world_size=world_size,
        rank=rank,
        batch_size=BATCH,
        shuffle=True,
        training=True,
        seed=4,
        accumulate=case["accumulate"],
    )


class Watching(Hook):
    """Fingerprints of every rank at each epoch end."""

    def __init__(self, ema: ExponentialMovingAverage) -> None:
        self.ema = ema
        self.fingerprints: list[list[str]] = []

    @hooks_into("on_epoch_finished")
    def compare(self, context: Any) -> None:
        strategy = get_active_strategy()
        for model in (context.model, self.ema.model):
            self.fingerprints.append(strategy.all_gather_object(strategy.fingerprint(model)))


class Counting(Hook):
    """Which buckets each part's wrapper reduced, by optimizer step; the dry steps are left out."""

    def __init__(self, model: GANModel) -> None:
        self.steps: list[dict[str, list[int]]] = []
        self._now: dict[str, list[int]] = {"generator": [], "discriminator": []}
        self.is_wrapped = isinstance(model.generator, DistributedDataParallel)
        for name, part in model.trainable_modules().items():
            if isinstance(part, DistributedDataParallel):
                part.register_comm_hook(self._now[name], self.reduce)

    @staticmethod
    def reduce(reduced: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    @hooks_into("on_epoch_start")
    def forget(self, context: Any) -> None:
        for reduced in self._now.values():
            reduced.clear()

    @hooks_into("on_post_step")
    def keep(self, context: Any) -> None:
        if context.ends_window:
            self.steps.append({name: list(reduced) for name, reduced in self._now.items()})
            self.forget(context)


def by_the_runner(
    case: dict[str, Any], epochs: int = EPOCHS, checkpoints: CheckpointStore | None = None
) -> dict[str, Any]:
    strategy = get_active_strategy()
    model = strategy.prepare(make_model(case["norm"]))
    assert isinstance(model, GANModel)
    counting, ema = Counting(model), ExponentialMovingAverage(model.generator, 0.5)
    optimizers = {
        name: torch.optim.SGD(part.parameters(), lr=rate)
        for (name, part), rate in zip(model.trainable_modules().items(), RATES, strict=True)
    }
    term = AdversarialTerm(criterion=CRITERIA[case["criterion"]](), weight=WEIGHT)
    runner = GANRunner(model, optimizers, Objective({"l2": squared}), adversarial=term, ema=ema)
    turns = TURNS[case["turns"]]
    for hook in (turns, R1Penalty(GAMMA, PENALTY_INTERVAL) if case["penalty"] else None, counting):
        if hook is not None:
            runner.hooks.attach(hook)
    sampler, watching = sampler_of(case, strategy.world_size, strategy.rank), Watching(ema)
    loader = DataLoader(
        Pictures(sampler.plan.num_samples), batch_size=BATCH, sampler=sampler, generator=torch.Generator()
    )
    trainer = Trainer(runner, seed=4, hooks=[watching], checkpoints=checkpoints)
    trainer.resume()
    result = trainer.train(epochs, loader)
    return {
        "weights": {name: value.cpu() for name, value in plain_state_dict(model).items()},
        "fingerprints": watching.fingerprints,
        "buckets": counting.steps if counting.is_wrapped else None,
        "steps": result.global_step,
    }


def losses_of(
    case: dict[str, Any], real: list[Tensor], fake: list[Tensor], counts: list[int], side: str
) -> list[Tensor]:
    """Return each rank's mean loss, by torch's own cross entropy where there is one."""
    entropy = functional.binary_cross_entropy_with_logits

    def labelled(logits: Tensor, label: float) -> Tensor:
        return entropy(logits, torch.full_like(logits, label))

    kind, for_generator = case["criterion"], side == "generator"
    if kind == "vanilla":
        if for_generator:
            return [labelled(f, 1) for f in fake]
        return [labelled(r, 1) + labelled(f, 0) for r, f in zip(real, fake, strict=True)]
    if kind == "hinge":
        if for_generator:
            return [-f.mean() for f in fake]
        return [(1 - r).clamp(min=0).mean() + (1 + f).clamp(min=0).mean() for r, f in zip(real, fake, strict=True)]
    if kind == "relativistic":
        return [labelled(f - r, float(for_generator)) for r, f in zip(real, fake, strict=True)]
    joined = [
        torch.cat([x for x, count in zip(logits, counts, strict=True) if count]).mean() for logits in (real, fake)
    ]
    label = float(not for_generator)
    return [
        labelled(r - joined[1], label) + labelled(f - joined[0], 1 - label) for r, f in zip(real, fake, strict=True)
    ]


class Oracle:
    """One process, no framework: every rank's micro-batches, one after the other."""

    def __init__(self, case: dict[str, Any], world_size: int) -> None:
        self.case = case
        self.model = make_model(case["norm"]).to(get_active_strategy().device)
        self.samplers = [sampler_of(case, world_size, rank) for rank in range(world_size)]
        self.data = Pictures(self.samplers[0].plan.num_samples)
        self.step = 0

    def buffers(self) -> list[dict[str, Tensor]]:
        return [{name: b.clone() for name, b in m.named_buffers(recurse=False)} for m in self.model.modules()]

    def rewind(self, state: list[dict[str, Tensor]]) -> None:
        for module, own in zip(self.model.modules(), state, strict=True):
            for name, value in own.items():
                module._buffers[name] = value.clone()

    def train(self) -> dict[str, Tensor]:
        plan = self.samplers[0].plan
        for epoch in range(EPOCHS):
            for sampler in self.samplers:
                sampler.set_epoch(epoch)
            keys = [[int(key) for key in sampler] for sampler in self.samplers]
            gradients: dict[str, list[Tensor]] = {}
            for micro in range(plan.num_micro_batches):
                shares = [own[micro * BATCH : (micro + 1) * BATCH] for own in keys]
                scales = [plan.loss_scale(micro, rank) / len(shares) for rank in range(len(shares))]
                counts = [plan.local_count(micro, rank) for rank in range(len(shares))]
                self.add_gradients(gradients, shares, scales, counts)
                if plan.ends_window(micro):
                    self.take_step(gradients)
        return self.model.state_dict()

    def add_gradients(
        self, gradients: dict[str, list[Tensor]], shares: list[list[int]], scales: list[float], counts: list[int]
    ) -> None:
        model, case, device = self.model, self.case, next(self.model.parameters()).device
        trains_generator = case["turns"] != "generator every second step" or self.step % 2 == 1
        is_alone = case["turns"] == "generator first" and self.step == 0
        lr = [self.data.lr[share].to(device) for share in shares]
        hr = [self.data.hr[share].to(device) for share in shares]
        fakes, judged, real, before = [], [], [], self.buffers()
        for own_lr, own_hr in zip(lr, hr, strict=True):
            self.rewind(before)
            fakes.append(model.generator(own_lr))
            if trains_generator and not is_alone:
                judged.append(model.discriminator(fakes[-1]))
                if case["criterion"].startswith("relativistic"):
                    real.append(model.discriminator(own_hr).detach())
        if trains_generator:
            losses = [squared(fake, own).mean() for fake, own in zip(fakes, hr, strict=True)]
            if not is_alone:
                adversarial = losses_of(case, real, judged, counts, "generator")
                losses = [loss + WEIGHT * more for loss, more in zip(losses, adversarial, strict=True)]
            self.collect(gradients, "generator", losses, scales)
        if is_alone:
            return
        real, fake, penalties, before = [], [], [], self.buffers()
        for own_fake, own_hr in zip(fakes, hr, strict=True):
            self.rewind(before)
            real.append(model.discriminator(own_hr))
            fake.append(model.discriminator(own_fake.detach()))
            if case["penalty"] and self.step % PENALTY_INTERVAL == 0:
                point = own_hr.clone().requires_grad_()
                means = model.discriminator(point).mean(dim=(1, 2, 3))
                (slope,) = torch.autograd.grad(means.sum(), point, create_graph=True)
                penalties.append(0.5 * GAMMA * PENALTY_INTERVAL * slope.square().sum(dim=(1, 2, 3)).mean())
        losses = losses_of(case, real, fake, counts, "discriminator")
        if penalties:
            losses = [loss + penalty for loss, penalty in zip(losses, penalties, strict=True)]
        self.collect(gradients, "discriminator", losses, scales)

    def collect(self, gradients: dict[str, list[Tensor]], part: str, losses: list[Tensor], scales: list[float]) -> None:
        total = torch.stack([loss * scale for loss, scale in zip(losses, scales, strict=True)]).sum()
        new = torch.autograd.grad(total, list(self.model.get_submodule(part).parameters()))
        known = gradients.get(part, [torch.zeros_like(gradient) for gradient in new])
        gradients[part] = [a + b for a, b in zip(known, new, strict=True)]

    def take_step(self, gradients: dict[str, list[Tensor]]) -> None:
        for part, rate in zip(("generator", "discriminator"), RATES, strict=True):
            if part in gradients:
                for parameter, gradient in zip(
                    self.model.get_submodule(part).parameters(), gradients[part], strict=True
                ):
                    parameter.data.sub_(rate * gradient)
        gradients.clear()
        self.step += 1


def run_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run every case on this fleet; each result says how far the weights are from the oracle's."""
    results = []
    for case in cases:
        strategy = start(static_graph=case["static"])
        found = by_the_runner(case)
        expected = Oracle(case, strategy.world_size).train()
        names = [name for name, _ in make_model(case["norm"]).named_parameters()]
        found["error"] = max(
            float((found["weights"][n] - expected[n].cpu()).abs().max() / expected[n].abs().max().clamp(min=1e-3))
            for n in names
        )
        del found["weights"]
        results.append(found)
        set_active_strategy(None)
    return results


def interrupted_and_not(case: dict[str, Any]) -> list[list[list[str]]]:
    """Return the last fingerprints of all ranks: of a run in one go, and of one that another launch continues."""
    ends = []
    for launches in ((EPOCHS + 1,), (1, EPOCHS + 1)):
        with tempfile.TemporaryDirectory() as folder:
            for epochs in launches:
                start(static_graph=case["static"])
                torch.manual_seed(epochs)
                found = by_the_runner(case, epochs, CheckpointStore(folder))
                set_active_strategy(None)
        ends.append(found["fingerprints"][-2:])
    return ends
