import pytest
import torch
from torch.nn import functional

from srforge.distributed import ConfigurationError, set_active_strategy
from srforge.distributed.testing import FakeStrategy
from srforge.training import (
    AdversarialTerm,
    Hinge,
    LeastSquares,
    LinearRamp,
    Relativistic,
    RelativisticAverage,
    Vanilla,
    Wasserstein,
)
from srforge.training.adversarial import fleet_means


def logits(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cross_entropy(values, label):
    """Torch's own, per sample."""
    targets = torch.full_like(values, label)
    loss = functional.binary_cross_entropy_with_logits(values, targets, reduction="none")
    return loss.reshape(len(values), -1).mean(dim=1)


def mean(values):
    return values.reshape(len(values), -1).mean(dim=1)


REFERENCES = {
    "vanilla": (Vanilla(), lambda r, f: cross_entropy(f, 1), lambda r, f: cross_entropy(r, 1) + cross_entropy(f, 0)),
    "smoothed": (
        Vanilla(smoothing=0.1),
        lambda r, f: cross_entropy(f, 1),
        lambda r, f: cross_entropy(r, 0.9) + cross_entropy(f, 0),
    ),
    "lsgan": (
        LeastSquares(),
        lambda r, f: mean((f - 1) ** 2) / 2,
        lambda r, f: mean((r - 1) ** 2) / 2 + mean(f**2) / 2,
    ),
    "smoothed lsgan": (
        LeastSquares(smoothing=0.2),
        lambda r, f: mean((f - 1) ** 2) / 2,
        lambda r, f: mean((r - 0.8) ** 2) / 2 + mean(f**2) / 2,
    ),
    "hinge": (Hinge(), lambda r, f: -mean(f), lambda r, f: mean((1 - r).clamp(min=0)) + mean((1 + f).clamp(min=0))),
    "wasserstein": (Wasserstein(), lambda r, f: -mean(f), lambda r, f: mean(f) - mean(r)),
    "relativistic": (Relativistic(), lambda r, f: cross_entropy(f - r, 1), lambda r, f: cross_entropy(r - f, 1)),
    "relativistic average": (
        RelativisticAverage(),
        lambda r, f: cross_entropy(r - f.mean(), 0) + cross_entropy(f - r.mean(), 1),
        lambda r, f: cross_entropy(r - f.mean(), 1) + cross_entropy(f - r.mean(), 0),
    ),
    "smoothed relativistic average": (
        RelativisticAverage(smoothing=0.1),
        lambda r, f: cross_entropy(r - f.mean(), 0) + cross_entropy(f - r.mean(), 1),
        lambda r, f: cross_entropy(r - f.mean(), 0.9) + cross_entropy(f - r.mean(), 0),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 1, 3, 2)])
def test_losses_are_those_of_the_papers_for_each_sample(name, shape):
    criterion, generator, discriminator = REFERENCES[name]
    real, fake = logits(1, *shape), logits(2, *shape)
    torch.testing.assert_close(criterion.generator_loss(real, fake, 5), generator(real, fake))
    torch.testing.assert_close(criterion.discriminator_loss(real, fake, 5), discriminator(real, fake))


@pytest.mark.parametrize("name", [n for n, (c, _, _) in REFERENCES.items() if not c.compares])
def test_the_generators_loss_needs_no_real_images_unless_it_compares(name):
    assert REFERENCES[name][0].generator_loss(None, logits(2, 4, 1), 4).shape == (4,)


def test_large_logits_stay_finite():
    for criterion, _, _ in REFERENCES.values():
        far = torch.tensor([1e4, -1e4], requires_grad=True)
        loss = criterion.discriminator_loss(far, -far, 2) + criterion.generator_loss(far, -far, 2)
        loss.sum().backward()
        assert torch.isfinite(loss).all()
        assert torch.isfinite(far.grad).all()


def test_means_over_a_fleet_weigh_ranks_by_their_real_samples():
    """Two ranks in one process: this one has 3 samples, the other 1; a third only repeats one of ours."""
    own, other, repeated = logits(1, 3, 2), logits(2, 1, 2), logits(3, 2, 2)
    told = {1: torch.stack([other.mean(), torch.ones((), dtype=torch.float64)]), 2: torch.zeros(2, dtype=torch.float64)}
    set_active_strategy(FakeStrategy(0, 3, peers=lambda operation, rank, value: told[rank]))
    (found,) = fleet_means([own], 3)
    torch.testing.assert_close(found, torch.cat([own, other]).mean())
    told = {
        1: torch.stack([own.mean() * 3, torch.tensor(3.0).double()]),
        2: torch.stack([other.mean(), torch.ones(()).double()]),
    }
    (found,) = fleet_means([repeated], 0)
    torch.testing.assert_close(found, torch.cat([own, other]).mean())


def test_gradients_of_the_fleets_mean_come_from_every_ranks_loss():
    """Each of four equal ranks squares the mean: this rank's sample sees the four losses, through a quarter each."""
    set_active_strategy(FakeStrategy(0, 4))
    value = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    (found,) = fleet_means([value], 1)
    found.square().backward()
    assert found.item() == 3.0
    assert value.grad.item() == pytest.approx(4 * 2 * 3.0 / 4)


def test_the_weight_may_ramp_with_the_epoch():
    term = AdversarialTerm(criterion=Hinge(), weight=LinearRamp(0.0, 0.1, 2))
    assert [term.weight_at(epoch) for epoch in range(4)] == pytest.approx([0, 0.05, 0.1, 0.1])
    assert AdversarialTerm(criterion=Hinge(), weight=0.3).weight_at(7) == 0.3


@pytest.mark.parametrize("kind", [Vanilla, LeastSquares, RelativisticAverage])
@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_smoothing_stays_within_its_range(kind, smoothing):
    with pytest.raises(ConfigurationError, match=r"`smoothing` must be in \[0, 1\), but is"):
        kind(smoothing)
