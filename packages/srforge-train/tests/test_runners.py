import itertools
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import Lines, loader_of, make_model, make_runner, make_trainer, squared

import srforge.training
from srforge.distributed import ConfigurationError, begin_epoch, setup_device
from srforge.training import (
    ExponentialMovingAverage,
    Hook,
    Metrics,
    NonFiniteGradientError,
    Objective,
    RunnerOptions,
    Schedule,
    TrainingRunner,
    ValidationRunner,
    hooks_into,
)


def hand_written(num_epochs, accumulate, batch_size=4, num_samples=22, max_norm=None):
    """The same training as a plain loop over the whole windows: no framework, one process."""
    model, data = make_model(), Lines(num_samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = loader_of(data, batch_size=batch_size, accumulate=accumulate).sampler
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        keys, size = list(sampler), batch_size * accumulate
        for start in range(0, len(keys), size):
            window = keys[start : start + size]
            optimizer.zero_grad()
            squared(model(data.lr[window]), data.hr[window]).mean().backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return model


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_training_equals_a_hand_written_loop_tail_and_accumulation_included(accumulate, max_norm):
    runner = make_runner(options=RunnerOptions(max_norm=max_norm))
    loader = loader_of(Lines(22), accumulate=accumulate)
    for epoch in range(3):
        begin_epoch(epoch, 1, loader)
        runner.run_epoch(loader, epoch)
    expected = hand_written(3, accumulate, max_norm=max_norm)
    for ours, theirs in zip(runner.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert runner.global_step == 3 * -(-22 // (4 * accumulate))


def test_metrics_of_an_epoch_count_every_sample_once():
    runner = make_runner(optimizer=lambda p: torch.optim.SGD(p, lr=0.0), metrics=Metrics({"again": squared}))
    data = Lines(22)
    tree = runner.run_epoch(loader_of(data, accumulate=3), 0)
    with torch.no_grad():
        expected = squared(runner.model(data.lr), data.hr).mean().item()
    for name in ("loss", "l2", "again"):
        assert float(tree[name].total) / tree[name].count == pytest.approx(expected, rel=1e-12)
        assert tree[name].count == 22
    assert tree["num_samples"].total == 22


class Watcher(Hook):
    def __init__(self):
        self.events, self.frames = [], None

    @hooks_into("on_epoch_start", "on_epoch_end")
    def epoch(self, context):
        self.events.append((context.phase, "epoch"))

    @hooks_into("on_pre_step")
    def pre(self, context):
        assert context.prediction is None
        self.events.append(("pre", context.index, context.global_step))

    @hooks_into("on_post_forward")
    def forward(self, context):
        assert context.prediction.shape == (context.count, 1)
        self.events.append("forward")

    @hooks_into("on_post_backward")
    def backward(self, context):
        assert all(p.grad is not None for p in context.model.parameters())
        self.events.append("backward")

    @hooks_into("on_post_step")
    def post(self, context):
        assert (context.grad_norm is not None) == context.ends_window
        self.events.append(("post", context.ends_window, context.global_step))


def test_hooks_fire_in_the_documented_order():
    runner, watcher = make_runner(), Watcher()
    runner.hooks.attach(watcher)
    runner.run_epoch(loader_of(Lines(12), accumulate=2), 0)
    assert watcher.events == [
        ("training", "epoch"),
        *(("pre", 0, 0), "forward", "backward", ("post", False, 0)),
        *(("pre", 1, 0), "forward", "backward", ("post", True, 0)),
        *(("pre", 2, 1), "forward", "backward", ("post", True, 1)),
        ("training", "epoch"),
    ]


def test_a_hook_may_add_a_term_to_the_loss():
    class Pull(Hook):
        @hooks_into("on_post_forward")
        def pull(self, context):
            context.terms.add("pull", sum(p.square().sum() for p in context.model.parameters()), weight=1e3)

    runner = make_runner(optimizer=lambda p: torch.optim.SGD(p, lr=1e-4))
    runner.hooks.attach(Pull())
    before = sum(p.detach().square().sum().item() for p in runner.model.parameters())
    tree = runner.run_epoch(loader_of(Lines(40)), 0)
    assert sum(p.detach().square().sum().item() for p in runner.model.parameters()) < before / 2
    assert "pull" in tree


def test_two_of_our_frames_lie_between_the_script_and_the_optimizers_step():
    stacks = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            stacks.append(traceback.extract_stack(sys._getframe()))
            return super().step(closure)

    trainer = make_trainer(make_runner(optimizer=lambda p: Looking(p, lr=0.1)))
    trainer.train(1, loader_of(Lines(8)), loader_of(Lines(4), training=False))
    package = str(Path(srforge.training.__file__).parent)
    ours = [frame.name for frame in stacks[0] if frame.filename.startswith(package)]
    assert ours == ["train", "run_epoch"]


class Syncs:
    """Counts what makes the host wait for the device, on any tensor."""

    NAMES = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self, monkeypatch):
        self.count, self.callers = 0, []
        for name in self.NAMES:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method):
        def counted(tensor, *args, **kwargs):
            caller = traceback.extract_stack(limit=8)
            if not any("torch/" in frame.filename for frame in caller[:-1][-3:]):
                self.count += 1
                self.callers.append([f"{f.filename}:{f.lineno}" for f in caller[:-1][-3:]])
            return method(tensor, *args, **kwargs)

        return counted


@pytest.mark.parametrize("policy", ["raise", "ignore"])
def test_no_step_makes_the_host_wait(monkeypatch, policy):
    counts = []
    for num_samples in (16, 160):
        runner = make_runner(
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
            metrics=Metrics({"again": squared, "bands": lambda p, t: {"a": squared(p, t), "b": squared(p, t)}}),
            options=RunnerOptions(max_norm=1.0, non_finite=policy),
            schedule=Schedule(),
        )
        loader = [{"lr": batch["lr"], "hr": batch["hr"]} for batch in loader_of(Lines(num_samples, torch.float32))]
        runner.model.float()
        with monkeypatch.context() as patch:
            syncs = Syncs(patch)
            runner.run_epoch(loader, 0)
            counts.append(syncs.count)
    assert counts[0] == counts[1], syncs.callers
    assert counts[0] <= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="host syncs are seen on a GPU only")
def test_no_step_waits_for_the_device():
    model, device = setup_device(make_model(dtype=torch.float32), "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = RunnerOptions(max_norm=1.0)
    runner = TrainingRunner(
        model, optimizer, Objective({"l2": squared}), metrics=Metrics({"b": squared}), options=options
    )
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


def test_a_broken_gradient_ends_the_epoch_by_name():
    data = Lines(8)
    data.hr[3] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="training epoch 4"):
        make_runner().run_epoch(loader_of(data), 4)


def test_skipped_steps_are_counted_and_leave_finite_weights():
    data = Lines(16)
    data.hr[3] = float("inf")
    runner = make_runner(options=RunnerOptions(non_finite="skip"))
    tree = runner.run_epoch(loader_of(data), 0)
    assert float(tree["skipped_steps"].total) == 1.0
    norm = tree["grad_norm"]
    assert torch.isfinite(norm.total)
    assert float(norm.count) == 3.0, "the norm is the mean over the steps that were taken"
    assert all(torch.isfinite(p).all() for p in runner.model.parameters())


@pytest.mark.parametrize(("term", "metric"), [("loss", "a"), ("grad_norm", "a"), ("a", "num_samples"), ("a", "a")])
def test_a_term_under_a_name_that_is_reported_already_is_refused(term, metric):
    model, _ = setup_device(make_model(), "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="Names of terms must be their own, but"):
        TrainingRunner(model, optimizer, Objective({term: squared}), metrics=Metrics({metric: squared}))


def test_max_steps_ends_the_epoch_after_so_many_optimizer_steps():
    runner = make_runner()
    runner.run_epoch(loader_of(Lines(40), accumulate=2), 0, max_steps=3)
    assert runner.global_step == 3


def test_validation_measures_every_sample_without_a_trace():
    runner, data = make_runner(), Lines(7)
    validator = ValidationRunner(runner.model, Metrics({"l2": squared}))
    before = {name: value.clone() for name, value in runner.model.state_dict().items()}
    tree = validator.run_epoch(loader_of(data, training=False), 0)
    with torch.no_grad():
        expected = squared(runner.model(data.lr), data.hr).sum().item()
    assert (float(tree["l2"].total), tree["l2"].count) == (pytest.approx(expected, rel=1e-12), 7)
    assert all(torch.equal(value, before[name]) for name, value in runner.model.state_dict().items())
    assert all(p.grad is None for p in runner.model.parameters())


def test_validation_measures_the_average_when_there_is_one_and_the_baseline_apart():
    model = make_model()
    runner = make_runner(model, ema=ExponentialMovingAverage(model))
    nn.init.zeros_(runner.ema.model[2].weight)
    nn.init.zeros_(runner.ema.model[2].bias)
    data = Lines(5)
    validator = ValidationRunner(
        runner.model, Metrics({"l2": squared}), ema=runner.ema, baseline=lambda batch: batch["hr"] + 2
    )
    loader = loader_of(data, training=False)
    assert float(validator.run_epoch(loader, 0)["l2"].total) == pytest.approx(data.hr.square().sum().item())
    assert float(validator.run_baseline(loader)["l2"].total) == pytest.approx(5 * 4.0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_close_to_full_precision(precision):
    results = {}
    for mode in ("fp32", precision):
        runner = make_runner(make_model(dtype=torch.float32), options=RunnerOptions(precision=mode))
        for epoch in range(5):
            tree = runner.run_epoch(loader_of(Lines(64, torch.float32)), epoch)
        results[mode] = float(tree["loss"].total) / tree["loss"].count
        assert all(p.dtype == torch.float32 for p in runner.model.parameters())
    assert results[precision] == pytest.approx(results["fp32"], rel=0.1)
    assert runner.precision.scaler.is_enabled() == (precision == "fp16")


class Overflow(Hook):
    """Lets gradients overflow in the first micro-batch, and counts the steps after which the weights are the same."""

    def __init__(self):
        self.weights = []

    @hooks_into("on_pre_step")
    def remember(self, context):
        self.weights.append(context.model[0].weight.clone())

    @hooks_into("on_post_forward")
    def overflow(self, context):
        if context.index == 0:
            context.terms["l2"] = context.terms["l2"] * float("inf")


def test_steps_that_the_scaler_skips_are_counted_and_torch_does_not_blame_the_schedule():
    runner, overflow = make_runner(make_model(dtype=torch.float32), options=RunnerOptions(precision="fp16")), Overflow()
    scheduler = torch.optim.lr_scheduler.StepLR(runner.optimizer, 100)
    runner.schedule = Schedule(scheduler, "step")
    runner.hooks.attach(overflow)  # warnings are errors here
    result = make_trainer(runner, validate=False).train(1, loader_of(Lines(20, torch.float32)))
    weights = [*overflow.weights, runner.model[0].weight]
    unchanged = [torch.equal(before, after) for before, after in itertools.pairwise(weights)]
    assert unchanged[0]
    assert not all(unchanged)
    assert result.metrics["training"]["skipped_steps"] == sum(unchanged)
    assert (result.global_step, scheduler.last_epoch) == (5, 5)
