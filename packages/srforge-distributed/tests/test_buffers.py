import torch
from torch import nn

from srforge.distributed.buffers import batchnorm_statistics, sync_buffers


def model_with_buffers():
    model = nn.Sequential(
        nn.BatchNorm2d(3),
        nn.InstanceNorm2d(3, track_running_stats=True),
        nn.BatchNorm1d(2).double(),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2)),
    )
    model.register_buffer("table", torch.arange(5))
    return model


def test_only_batchnorm_statistics_are_averaged():
    model = model_with_buffers()
    assert {id(t) for t in batchnorm_statistics(model)} == {
        id(t) for t in (model[0].running_mean, model[0].running_var, model[2].running_mean, model[2].running_var)
    }


def test_statistics_become_the_mean_and_the_rest_rank_0s():
    """Two ranks, this one is rank 1: the other's statistics are larger by 1, its other buffers by 10."""
    model = model_with_buffers()
    statistics = {id(tensor) for tensor in batchnorm_statistics(model)}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    calls = []

    def all_gather(flat):
        calls.append("all_gather")
        return torch.stack([flat + 1, flat])

    def broadcast(flat):
        """Add 10 to what is inside: floats of 32 bits and integers of 64."""
        calls.append("broadcast")
        return (flat.view(torch.float32) + 10).view(torch.int32) if flat.dtype == torch.int32 else flat + 10

    sync_buffers(model, all_gather, broadcast)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name] + (0.5 if id(buffer) in statistics else 10))
    assert sorted(calls) == ["all_gather"] * 2 + ["broadcast"] * 2  # one for each kind and width, however many layers


def test_equal_statistics_stay_equal_to_the_bit():
    model = nn.BatchNorm1d(1000)
    model.running_mean.normal_()
    before = model.running_mean.clone()
    sync_buffers(model, lambda flat: torch.stack([flat] * 7), lambda flat: flat)
    assert torch.equal(model.running_mean, before)


def test_model_without_buffers_needs_no_collective():
    sync_buffers(nn.Linear(2, 2), None, None)
