"""Laws of adversarial training in one process; those of fleets are in tests-integration."""

import copy
import traceback
from pathlib import Path

import pytest
import torch
from gan_toys import Steps, assert_same_state, make_gan, make_runner, train, without_dropout
from torch import nn
from torch.nn import functional
from toys import Lines, loader_of, squared

import srforge.training
from srforge.distributed import ConfigurationError, set_active_strategy, setup_device
from srforge.distributed.testing import FakeStrategy
from srforge.training import (
    AdversarialTerm,
    CheckpointStore,
    ExponentialMovingAverage,
    GANModel,
    GANRunner,
    Hinge,
    Hook,
    LinearRamp,
    Metrics,
    Objective,
    R1Penalty,
    RelativisticAverage,
    RunnerOptions,
    Schedule,
    StepRatio,
    Trainer,
    ValidationRunner,
    hooks_into,
    warmup_cosine,
)


def add_gradients(totals, loss, part, share):
    for total, gradient in zip(totals, torch.autograd.grad(loss, list(part.parameters())), strict=True):
        total.add_(share * gradient)


def hand_written(num_epochs, accumulate, *, max_norms=(None, None), penalty=0.0, batch_size=4, num_samples=22):
    """The same training as a plain loop, written with torch's own losses."""
    model, data = without_dropout(make_gan()), Lines(num_samples)
    sides = (model.generator, model.discriminator)
    optimizers = [torch.optim.SGD(side.parameters(), lr) for side, lr in zip(sides, (0.05, 0.02), strict=True)]
    sampler = loader_of(data, batch_size=batch_size, accumulate=accumulate).sampler
    cross_entropy = functional.binary_cross_entropy_with_logits
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        keys, size = list(sampler), batch_size * accumulate
        for start in range(0, len(keys), size):
            window = keys[start : start + size]
            gradients = [[torch.zeros_like(p) for p in side.parameters()] for side in sides]
            for micro in (window[i : i + batch_size] for i in range(0, len(window), batch_size)):
                share = len(micro) / len(window)
                fake = model.generator(data.lr[micro])
                judged = model.discriminator(fake)
                loss = squared(fake, data.hr[micro]).mean() + 0.1 * cross_entropy(judged, torch.ones_like(judged))
                add_gradients(gradients[0], loss, model.generator, share)
                hr = data.hr[micro].clone().requires_grad_()
                real, fake = model.discriminator(hr), model.discriminator(fake.detach())
                loss = cross_entropy(real, torch.ones_like(real)) + cross_entropy(fake, torch.zeros_like(fake))
                if penalty:
                    judged = model.discriminator(hr).mean(dim=1).sum()
                    (slope,) = torch.autograd.grad(judged, hr, create_graph=True)
                    loss = loss + penalty * 0.5 * slope.square().sum(dim=1).mean()
                add_gradients(gradients[1], loss, model.discriminator, share)
            for side, own, optimizer, norm in zip(sides, gradients, optimizers, max_norms, strict=True):
                for parameter, gradient in zip(side.parameters(), own, strict=True):
                    parameter.grad = gradient
                if norm is not None:
                    nn.utils.clip_grad_norm_(side.parameters(), norm)
                optimizer.step()
    return model


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [None, {"generator": 0.2, "discriminator": 0.05}])
@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_training_equals_a_hand_written_loop(accumulate, max_norm, penalty):
    hooks = [R1Penalty(penalty)] if penalty else []
    runner = make_runner(without_dropout(make_gan()), hooks=hooks, options=RunnerOptions(max_norm=max_norm))
    train(runner, accumulate=accumulate)
    norms = (0.2, 0.05) if max_norm else (None, None)
    expected = hand_written(3, accumulate, max_norms=norms, penalty=penalty)
    assert_same_state(runner.model, expected, rtol=1e-10, atol=1e-12)
    assert runner.global_step == 3 * -(-22 // (4 * accumulate))


class Watcher(Hook):
    def __init__(self):
        self.events = []

    @hooks_into("on_pre_step")
    def pre(self, context):
        self.events.append("pre")

    @hooks_into("on_post_forward")
    def forward(self, context):
        assert "adversarial" not in context.terms.values()
        self.events.append("forward")

    @hooks_into("on_post_g_forward")
    def g_forward(self, context):
        assert "adversarial" in context.terms.values()
        self.events.append("g_forward")

    @hooks_into("on_post_g_backward")
    def g_backward(self, context):
        assert all(p.grad is not None for p in context.model.generator.parameters())
        if self.events.count("g_backward") == 0:
            assert all(p.grad is None for p in context.model.discriminator.parameters()), "it was frozen"
        self.events.append("g_backward")

    @hooks_into("on_post_d_forward")
    def d_forward(self, context):
        assert context.real_logits.shape == context.fake_logits.shape == (context.count, 2)
        assert not context.discriminator_terms.without_gradient()
        self.events.append("d_forward")

    @hooks_into("on_post_d_backward")
    def d_backward(self, context):
        assert all(p.grad is not None for p in context.model.discriminator.parameters())
        self.events.append("d_backward")

    @hooks_into("on_post_backward")
    def backward(self, context):
        self.events.append("backward")

    @hooks_into("on_post_step")
    def post(self, context):
        assert set(context.grad_norms) == ({"generator", "discriminator"} if context.ends_window else set())
        self.events.append("post")


def test_hooks_fire_in_the_documented_order():
    watcher = Watcher()
    train(make_runner(hooks=[watcher]), 1, 8, accumulate=2)
    names = "pre forward g_forward g_backward d_forward d_backward backward post"
    assert watcher.events == 2 * names.split()


def test_a_hook_may_replace_what_the_discriminator_sees_and_add_to_either_loss():
    class Meddling(Hook):
        @hooks_into("on_post_forward")
        def replace(self, context):
            context.prediction = context.prediction * 0 + 7
            context.terms.add("extra", context.prediction.mean(dim=1), 2.0)

        @hooks_into("on_post_d_forward")
        def check(self, context):
            seen = context.judge(torch.full_like(context.real, 7.0))
            torch.testing.assert_close(context.fake_logits, seen)

    model = make_gan()
    model.discriminator[1] = nn.Identity()
    tree = train(make_runner(model, hooks=[Meddling()]), 1)
    assert float(tree["extra"].total / tree["extra"].count) == pytest.approx(7)


def test_metrics_of_an_epoch_count_every_sample_once():
    model = without_dropout(make_gan())
    model.discriminator[1] = nn.Identity()
    runner = make_runner(model, rates=(0.0, 0.0), metrics=Metrics({"again": squared}))
    tree = train(runner, 1, accumulate=3)
    data = Lines(22)
    with torch.no_grad():
        fake = model.generator(data.lr)
        real_logit, fake_logit = model.discriminator(data.hr), model.discriminator(fake)
    l2 = squared(fake, data.hr).mean().item()
    adversarial = functional.softplus(-fake_logit).mean().item()
    judged = functional.softplus(-real_logit).mean().item() + functional.softplus(fake_logit).mean().item()
    flat = {**tree, **{f"d/{name}": value for name, value in tree["discriminator"].items()}}
    expected = {"l2": l2, "again": l2, "adversarial": adversarial, "loss": l2 + 0.1 * adversarial}
    expected |= {"d/loss": judged, "d/adversarial": judged}
    expected |= {"d/real_logit": real_logit.mean().item(), "d/fake_logit": fake_logit.mean().item()}
    for name, value in expected.items():
        assert float(flat[name].total) / flat[name].count == pytest.approx(value, rel=1e-12), name
        assert flat[name].count == 22, name
    assert tree["num_samples"].total == 22
    assert set(tree["grad_norm"]) == {"generator", "discriminator"}


def make_trainer(folder=None, ema_decay=0.9):
    hooks = [R1Penalty(0.5, 2), StepRatio(discriminator_every=2)]
    model, _ = setup_device(make_gan(torch.float32), "cpu")
    optimizers = {
        "generator": torch.optim.Adam(model.generator.parameters(), lr=0.01),
        "discriminator": torch.optim.Adam(model.discriminator.parameters(), lr=0.02),
    }
    schedules = {
        "generator": Schedule(warmup_cosine(optimizers["generator"], total_steps=30), "step"),
        "discriminator": Schedule(torch.optim.lr_scheduler.StepLR(optimizers["discriminator"], 1, 0.5)),
    }
    ema = ExponentialMovingAverage(model.generator, ema_decay)
    term = AdversarialTerm(criterion=RelativisticAverage(), weight=LinearRamp(0.0, 0.1, 2))
    runner = GANRunner(
        model,
        optimizers,
        Objective({"l2": squared}),
        adversarial=term,
        schedules=schedules,
        ema=ema,
        options=RunnerOptions(max_norm=1.0),
    )
    for hook in hooks:
        runner.hooks.attach(hook)
    validator = ValidationRunner(model, Metrics({"l2": squared}), ema=ema)
    return Trainer(runner, validator, seed=3, checkpoints=None if folder is None else CheckpointStore(folder))


def loaders():
    data = Lines(22, torch.float32)
    return loader_of(data, accumulate=2), loader_of(data, training=False)


def everything(trainer):
    runner = trainer.training_runner
    tensors = {f"model.{k}": v for k, v in runner.model.state_dict().items()}
    tensors |= {f"ema.{k}": v for k, v in runner.ema.model.state_dict().items()}
    for name, optimizer in runner.optimizers.items():
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{index}.{k}": v for k, v in state.items()}
    return tensors


def test_a_resumed_run_ends_on_the_bits_of_an_uninterrupted_one(tmp_path):
    straight = make_trainer()
    expected = straight.train(4, *loaders())
    make_trainer(tmp_path).train(2, *loaders())
    set_active_strategy(None)
    torch.manual_seed(99)
    resumed = make_trainer(tmp_path)
    assert resumed.resume() == 2
    result = resumed.train(4, *loaders())
    assert result.metrics == expected.metrics
    assert result.global_step == expected.global_step
    found, wanted = everything(resumed), everything(straight)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    for name in ("generator", "discriminator"):
        runners = resumed.training_runner, straight.training_runner
        rates = [runner.schedules[name].scheduler.get_last_lr() for runner in runners]
        assert rates[0] == rates[1]


def test_validation_measures_the_average_of_the_generator():
    trainer = make_trainer(ema_decay=0.0)
    result = trainer.train(1, *loaders())
    data, model = Lines(22, torch.float32), trainer.training_runner.ema.model
    assert set(model.state_dict()) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    with torch.no_grad():
        expected = squared(model(data.lr), data.hr).mean().item()
    assert result.metrics["validation"]["l2"] == pytest.approx(expected, rel=1e-5)


def test_two_frames_lie_between_the_script_and_each_optimizer():
    frames, package = [], str(Path(srforge.training.__file__).parent)

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            frames.append([f.name for f in traceback.extract_stack() if f.filename.startswith(package)])
            return super().step(closure)

    runner = make_runner(optimizer=Looking)
    Trainer(runner, seed=0).train(1, loader_of(Lines(4)))
    assert len(frames) == 2
    assert all(names == ["train", "run_epoch"] for names in frames)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_trains_with_a_scaler_for_each_side(precision):
    model = make_gan(torch.float32)
    runner = make_runner(model, hooks=[R1Penalty(0.1)], options=RunnerOptions(precision=precision))
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(runner, seed=0)
    trainer.train(1, loader_of(Lines(16, torch.float32)))
    assert runner.scalers["generator"] is not runner.scalers["discriminator"]
    assert all(s.is_enabled() == (precision == "fp16") for s in runner.scalers.values())
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters() if "weight" in n)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_further_parts_step_with_the_generator():
    class Three(GANModel):
        def __init__(self, generator, discriminator):
            super().__init__(generator, discriminator)
            self.encoder = nn.Linear(3, 3)

        def trainable_modules(self):
            return {**super().trainable_modules(), "encoder": self.encoder}

        def forward(self, lr):
            return self.generator(self.encoder(lr))

    model, _ = setup_device(make_gan(model=Three), "cpu")
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in model.trainable_modules().items()}
    runner = GANRunner(model, optimizers, Objective({"l2": squared}), adversarial=AdversarialTerm(criterion=Hinge()))
    steps = Steps()
    for hook in (StepRatio(generator_every=2), steps):
        runner.hooks.attach(hook)
    Trainer(runner, seed=0).train(1, loader_of(Lines(8)))
    assert steps.moved == ["d", "deg"]


def test_parameters_that_were_frozen_stay_frozen():
    model = make_gan()
    frozen = model.discriminator[0].requires_grad_(False)
    before = frozen.weight.clone()
    runner = make_runner(model, optimizer=lambda ps, lr: torch.optim.SGD([p for p in ps if p.requires_grad], lr=lr))
    train(runner, 1)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert torch.equal(before, frozen.weight)


def test_rehearsal_leaves_no_trace():
    runner = make_runner()
    before = copy.deepcopy(runner.model.state_dict())
    Trainer(runner, seed=0).rehearse(loader_of(Lines(8)))
    assert_same_state(runner.model, type("State", (), {"state_dict": lambda self: before})(), rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in runner.model.parameters())


def test_refuses_a_model_without_discriminator():
    model, _ = setup_device(make_gan().generator, "cpu")
    with pytest.raises(
        ConfigurationError, match=r"trainable_modules\(\)` must name a discriminator and what it judges"
    ):
        GANRunner(model, {}, Objective({"l2": squared}), adversarial=AdversarialTerm(criterion=Hinge()))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"generator": "generator"}, "must be named generator, discriminator and so on, but are"),
        (
            {"generator": "discriminator", "discriminator": "discriminator"},
            "must have no parameter of the discriminator",
        ),
        ({"generator": "generator", "discriminator": "generator"}, "must have the discriminator's parameters only"),
    ],
)
def test_refuses_optimizers_of_the_other_sides_parameters(names, message):
    model, _ = setup_device(make_gan(), "cpu")
    optimizers = {name: torch.optim.SGD(getattr(model, part).parameters(), lr=0.1) for name, part in names.items()}
    with pytest.raises(ConfigurationError, match=message):
        GANRunner(model, optimizers, Objective({"l2": squared}), adversarial=AdversarialTerm(criterion=Hinge()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="host syncs are seen on a GPU only")
def test_no_step_waits_for_the_device():
    set_active_strategy(None)
    model, device = setup_device(make_gan(torch.float32), "cuda")
    optimizers = {
        name: torch.optim.Adam(part.parameters(), fused=True) for name, part in model.trainable_modules().items()
    }
    term = AdversarialTerm(criterion=RelativisticAverage())
    runner = GANRunner(model, optimizers, Objective({"l2": squared}), adversarial=term)
    runner.hooks.attach(R1Penalty(1.0, 2))
    batch = {name: value.to(device) for name, value in Lines(4, torch.float32)[:4].items()}
    runner.run_epoch([batch] * 3, 0)

    class Strict(Hook):
        @hooks_into("on_epoch_start")
        def start(self, context):
            torch.cuda.set_sync_debug_mode("error")

        @hooks_into("on_post_step")
        def stop(self, context):
            if context.index == 4:
                torch.cuda.set_sync_debug_mode("default")

    runner.hooks.attach(Strict())
    runner.run_epoch([batch] * 5, 1)


def test_a_rank_of_a_fleet_scales_its_share():
    """Rank 1 of 2 alone: its loss has the weight of its samples, whatever the other rank holds."""
    set_active_strategy(FakeStrategy(1, 2))
    runner = make_runner(without_dropout(make_gan()))
    tree = train(runner, 1, 7)
    assert float(tree["num_samples"].total) == 3
