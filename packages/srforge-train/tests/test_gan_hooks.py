"""Whose turn it is, and penalties."""

import pytest
import torch
from gan_toys import Steps, assert_same_state, make_gan, make_runner, train, without_dropout
from torch import nn
from toys import Lines, loader_of, squared

from srforge.distributed import ConfigurationError
from srforge.training import (
    DiscriminatorWarmup,
    GradientPenalty,
    Hook,
    LinearRamp,
    R1Penalty,
    R2Penalty,
    RelativisticAverage,
    RunnerOptions,
    StepRatio,
    hooks_into,
)


def test_parts_train_at_a_ratio_and_the_global_step_counts_batches():
    steps = Steps()
    runner = make_runner(hooks=[StepRatio(generator_every=3), steps])
    train(runner, 1, 32)
    assert steps.moved == ["d", "d", "dg", "d", "d", "dg", "d", "d"]
    assert runner.global_step == 8


def test_the_discriminator_may_train_less_often():
    steps = Steps()
    train(make_runner(hooks=[StepRatio(discriminator_every=2), steps]), 1, 16)
    assert steps.moved == ["g", "dg", "g", "dg"]


def test_the_generator_may_start_alone_and_without_the_adversarial_term():
    model, steps = without_dropout(make_gan()), Steps()
    tree = train(make_runner(model, hooks=[DiscriminatorWarmup(3), steps]), 1, 20)
    assert steps.moved == ["g", "g", "g", "dg", "dg"]
    assert tree["adversarial"].count == 8, "in the two last steps"
    expected, data = without_dropout(make_gan()), Lines(20)
    optimizer = torch.optim.SGD(expected.generator.parameters(), lr=0.05)
    runner = make_runner(without_dropout(make_gan()), hooks=[DiscriminatorWarmup(3)])
    loader = loader_of(data)
    runner.run_epoch(loader, 0, max_steps=3)
    keys = list(loader.sampler)
    for start in (0, 4, 8):
        optimizer.zero_grad()
        squared(
            expected.generator(data.lr[keys[start : start + 4]]), data.hr[keys[start : start + 4]]
        ).mean().backward()
        optimizer.step()
    assert_same_state(runner.model.generator, expected.generator, rtol=1e-12, atol=1e-14)


def test_a_weight_of_zero_leaves_the_discriminator_out_of_the_generators_step():
    class Counting(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.calls = inner, 0

        def forward(self, images):
            self.calls += 1
            return self.inner(images)

    model = make_gan()
    model.discriminator = Counting(model.discriminator)
    runner = make_runner(model, weight=LinearRamp(0.0, 1.0, 1), criterion=RelativisticAverage())
    train(runner, 1, 4)
    assert model.discriminator.calls == 2
    runner.run_epoch(loader_of(Lines(4)), 1)
    assert model.discriminator.calls == 2 + 4


@pytest.mark.parametrize("interval", [1, 3])
def test_a_lazy_penalty_is_added_every_so_many_steps_and_multiplied_by_as_much(interval):
    class Weights(Hook):
        def __init__(self):
            self.found = []

        @hooks_into("on_post_d_forward")
        def look(self, context):
            terms = context.discriminator_terms.values()
            rest = context.discriminator_terms.total().detach() - terms["adversarial"].detach().mean()
            self.found.append(float(rest / terms["r1"].detach().mean()) if "r1" in terms else None)

    weights = Weights()
    train(make_runner(hooks=[R1Penalty(2.0, interval), weights]), 1, 16)
    expected = [2.0 * interval if step % interval == 0 else None for step in range(4)]
    assert weights.found == [pytest.approx(value) if value else None for value in expected]


@pytest.mark.parametrize("kind", [R1Penalty, R2Penalty, GradientPenalty])
def test_penalties_of_a_linear_discriminator_are_those_of_its_slope(kind):
    model = make_gan()
    model.discriminator = nn.Linear(1, 1, dtype=torch.float64)
    slope = model.discriminator.weight.item()
    tree = train(make_runner(model, rates=(0.0, 0.0), hooks=[kind(3.0)]), 1, 8)
    found = tree["discriminator"][kind.name]
    expected = (abs(slope) - 1) ** 2 if kind is GradientPenalty else 0.5 * slope**2
    assert float(found.total / found.count) == pytest.approx(expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StepRatio(0),
        lambda: StepRatio(1, 0),
        lambda: DiscriminatorWarmup(0),
        lambda: R1Penalty(0.0),
        lambda: R1Penalty(1.0, 0),
    ],
)
def test_hooks_refuse_numbers_without_sense(make):
    with pytest.raises(ConfigurationError, match=r"must be above 0 or null, but is 0"):
        make()


def test_a_skipped_step_is_counted_for_its_own_part():
    class Poison(Hook):
        @hooks_into("on_post_d_forward")
        def poison(self, context):
            if context.global_step == 1:
                context.discriminator_terms.add("nan", context.real_logits.mean() * float("nan"))

    steps = Steps()
    runner = make_runner(hooks=[Poison(), steps], options=RunnerOptions(non_finite="skip"))
    tree = train(runner, 1, 12)
    assert steps.moved == ["dg", "g", "dg"]
    assert {name: float(leaf.total) for name, leaf in tree["skipped_steps"].items()} == {
        "generator": 0,
        "discriminator": 1,
    }
    for leaf in tree["grad_norm"].values():
        assert torch.isfinite(leaf.total)
    assert float(tree["grad_norm"]["discriminator"].count) == 2


def test_a_hook_may_replace_what_is_real():
    class Other(Hook):
        @hooks_into("on_pre_step")
        def replace(self, context):
            context.batch["hr"] = torch.full_like(context.batch["hr"], 5.0)

        @hooks_into("on_post_d_forward")
        def check(self, context):
            assert (context.real == 5.0).all()
            expected = context.judge(torch.full_like(context.real, 5.0))
            torch.testing.assert_close(context.real_logits, expected)

    model = make_gan()
    model.discriminator[1] = nn.Identity()
    train(make_runner(model, hooks=[Other()]), 1, 4)
