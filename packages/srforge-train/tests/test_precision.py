import pytest
import torch
from torch import nn
from toys import Lines, loader_of, make_model, make_runner

from srforge.distributed import setup_device
from srforge.training import RunnerOptions
from srforge.training.precision import CompiledForFirstShape, Precision, accelerate

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_each_mode_computes_in_its_format_and_only_fp16_scales(mode, dtype):
    precision = Precision(mode, CPU)
    with precision.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    assert precision.scaler.is_enabled() == (mode == "fp16")
    loss = torch.tensor(2.0)
    assert (float(precision.scaler.scale(loss)) == 2.0) == (mode != "fp16")


def test_a_runner_of_another_mode_does_not_change_the_format_of_this_one():
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    training = Precision("tf32", torch.device("cuda"))
    validation = Precision("fp32", torch.device("cuda"))
    try:
        for precision, is_on in ((training, True), (validation, False), (training, True)):
            with precision.autocast():
                assert torch.backends.cuda.matmul.allow_tf32 is is_on
                assert torch.backends.cudnn.allow_tf32 is is_on
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


def test_only_inputs_of_the_first_shape_run_compiled(monkeypatch):
    calls = []

    def compiling(model, mode, dynamic):
        def compiled(*inputs):
            calls.append("compiled")
            return model(*inputs)

        assert (mode, dynamic) == ("default", False)
        return compiled

    monkeypatch.setattr(torch, "compile", compiling)
    model = nn.Linear(2, 1)
    network = CompiledForFirstShape(model, "default")
    for size in (4, 4, 3, 4):
        assert network(torch.ones(size, 2)).shape == (size, 1)
    assert calls == ["compiled"] * 3
    model.eval()
    network(torch.ones(4, 2))
    assert calls == ["compiled"] * 3, "another mode is another program"


def test_channels_last_reaches_the_weights():
    model, _ = setup_device(nn.Conv2d(3, 4, 3), "cpu")
    assert accelerate(model, RunnerOptions(channels_last=True)) is model
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_deterministic_is_asked_of_torch():
    try:
        accelerate(nn.Linear(1, 1), RunnerOptions(deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_fp16_goes_on_after_an_overflow():
    runner = make_runner(make_model(dtype=torch.float32), options=RunnerOptions(precision="fp16"))
    runner.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    data = Lines(160, torch.float32)
    norm = runner.run_epoch(loader_of(data), 0)["grad_norm"]
    assert torch.isfinite(norm.total)
    assert 0 < float(norm.count) < 40
    assert runner.precision.scaler.get_scale() < 2.0**40
    assert all(torch.isfinite(p).all() for p in runner.model.parameters())
