import pytest
import torch
from torch import nn

from srforge.distributed import ConfigurationError, setup_device
from srforge.training import ExponentialMovingAverage
from srforge.training.ema import bare_view


def batch_norm_model():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_the_average_is_the_weighted_sum_of_all_weights_seen():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1.0)
    ema = ExponentialMovingAverage(model, 0.9, warmup=False)
    expected = 1.0
    for value in (2.0, -1.0, 5.0):
        nn.init.constant_(model.weight, value)
        ema.update()
        expected = 0.9 * expected + 0.1 * value
    assert ema.model.weight.item() == pytest.approx(expected, rel=1e-12)


def test_warmup_starts_with_the_new_weights():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.0)
    ema = ExponentialMovingAverage(model, 0.999)
    nn.init.constant_(model.weight, 1.0)
    ema.update()  # decay (1 + 0) / (10 + 0)
    assert ema.model.weight.item() == pytest.approx(0.9)


def test_buffers_follow_and_the_average_has_no_gradient():
    model, _ = setup_device(batch_norm_model(), "cpu")
    ema = ExponentialMovingAverage(model)
    model(torch.randn(8, 2)).sum().backward()
    ema.update()
    assert torch.equal(ema.model[1].running_mean, model[1].running_mean)
    assert ema.model[1].num_batches_tracked.item() == 1
    assert not any(p.requires_grad for p in ema.model.parameters())
    assert not ema.model.training


def test_a_composite_is_averaged_whole_and_stays_independent():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.discriminator = nn.Linear(1, 1), nn.Linear(1, 1)

        def trainable_modules(self):
            return {"generator": self.generator, "discriminator": self.discriminator}

    model, _ = setup_device(Pair(), "cpu")
    ema = ExponentialMovingAverage(model, 0.5, warmup=False)
    assert set(ema.model.state_dict()) == set(model.state_dict())
    before = ema.model.generator.weight.clone()
    nn.init.constant_(model.generator.weight, 9.0)
    assert torch.equal(ema.model.generator.weight, before)


def test_a_bare_view_shares_everything_and_has_no_wrapper_at_any_depth():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)), nn.ReLU())

        def forward(self, x):
            return self.inner(x)

    model = nn.DataParallel(Nested())
    view = bare_view(model)
    assert not any(isinstance(module, nn.DataParallel) for module in view.modules())
    assert [id(p) for p in view.parameters()] == [id(p) for p in model.parameters()]
    assert isinstance(model.module.inner[0], nn.DataParallel), "the model itself stays wrapped"
    assert torch.equal(view(torch.ones(1, 1)), model.module.inner[0].module(torch.ones(1, 1)).relu())
    plain = nn.Linear(1, 1)
    assert bare_view(plain) is plain


def test_state_restores_average_and_count():
    model = batch_norm_model()
    ema, other = ExponentialMovingAverage(model), ExponentialMovingAverage(batch_norm_model())
    for _ in range(5):
        nn.init.normal_(model[0].weight)
        ema.update()
    other.load_state_dict(ema.state_dict())
    assert other.num_updates == 5
    for name, value in ema.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value)


def test_the_decay_has_a_range():
    with pytest.raises(ConfigurationError, match=r"`decay` must be in \[0, 1\), but is 1.0"):
        ExponentialMovingAverage(nn.Linear(1, 1), 1.0)


def test_complex_weights_are_averaged_and_integers_copied():
    model = nn.Module()
    model.phase = nn.Parameter(torch.tensor([1 + 1j], dtype=torch.complex128))
    model.steps = nn.Parameter(torch.tensor([3]), requires_grad=False)
    ema = ExponentialMovingAverage(model, 0.5, warmup=False)
    model.phase.data.fill_(3 - 1j)
    model.steps.data.fill_(4)
    ema.update()
    assert ema.model.phase.item() == 2 + 0j
    assert ema.model.steps.item() == 4


def test_a_buffer_that_appears_later_is_named():
    model = batch_norm_model()
    ema = ExponentialMovingAverage(model)
    model[0].register_buffer("cache", torch.zeros(2))
    with pytest.raises(ConfigurationError, match=r"must keep the buffers .* \['0.cache'\] came or went"):
        ema.update()


def test_a_model_without_weights_has_an_average():
    ExponentialMovingAverage(nn.Tanh()).update()
