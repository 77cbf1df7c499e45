"""A small adversarial training that tests can run in milliseconds."""

import copy

import torch
from torch import nn
from toys import Lines, loader_of, squared

from srforge.distributed import begin_epoch, setup_device
from srforge.training import (
    AdversarialTerm,
    GANModel,
    GANRunner,
    Hook,
    Objective,
    Vanilla,
    hooks_into,
)


def make_gan(dtype=torch.float64, model=None):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
    judge = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.LeakyReLU(0.2), nn.Linear(4, 2))
    return (model or GANModel)(generator, judge).to(dtype)


def without_dropout(model):
    model.generator[2].p = 0.0
    return model


def make_runner(model=None, *, optimizer=None, hooks=(), criterion=None, weight=0.1, rates=(0.05, 0.02), **arguments):
    model, _ = setup_device(make_gan() if model is None else model, "cpu")
    optimizer = optimizer or torch.optim.SGD
    optimizers = {
        "discriminator": optimizer(model.discriminator.parameters(), lr=rates[1]),
        "generator": optimizer(model.generator.parameters(), lr=rates[0]),
    }
    term = AdversarialTerm(criterion=criterion or Vanilla(), weight=weight)
    runner = GANRunner(model, optimizers, Objective({"l2": squared}), adversarial=term, **arguments)
    for hook in hooks:
        runner.hooks.attach(hook)
    return runner


def train(runner, num_epochs=3, num_samples=22, **loading):
    loader = loader_of(Lines(num_samples), **loading)
    for epoch in range(num_epochs):
        begin_epoch(epoch, 1, loader)
        tree = runner.run_epoch(loader, epoch)
    return tree


def assert_same_state(ours, theirs, **tolerance):
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name, **tolerance)


class Steps(Hook):
    """Which parts moved in each step."""

    def __init__(self):
        self.moved, self._before = [], None

    @hooks_into("on_pre_step")
    def before(self, context):
        self._before = copy.deepcopy(context.model.state_dict())

    @hooks_into("on_post_step")
    def after(self, context):
        names = dict(context.model.named_parameters())
        moved = {n.split(".")[0] for n, p in names.items() if not torch.equal(p, self._before[n])}
        self.moved.append("".join(sorted(part[0] for part in moved)))
