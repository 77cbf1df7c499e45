import math

import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr import EDSR, RRDBNet, bicubic_upscale
from srforge.sr.models.edsr import ResidualBlock
from srforge.sr.models.rrdbnet import DenseBlock, ResidualInResidualBlock
from srforge.sr.models.upsampling import prime_factors


def small(kind, scale, channels=3, **options):
    if kind == "rrdbnet":
        return RRDBNet(scale, channels, options.pop("out_channels", channels), 8, 1, 4, **options)
    return EDSR(scale, channels, options.pop("out_channels", channels), 8, 1, upsampler=kind, **options)


KINDS = ("direct", "staged", "rrdbnet")


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1, 2, 3, 4, 6, 8])
def test_an_untrained_model_is_bicubic_enlargement_exactly(kind, scale):
    lr = torch.rand(2, 3, 7, 9)
    output = small(kind, scale)(lr)
    assert output.shape == (2, 3, 7 * scale, 9 * scale)
    assert torch.equal(output, bicubic_upscale(lr, scale))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_one_step_trains_the_last_convolution_and_the_next_one_every_parameter(kind, channels):
    torch.manual_seed(0)
    model = small(kind, 2, channels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lr, hr = torch.rand(2, channels, 6, 6), torch.rand(2, channels, 12, 12)
    for _ in range(2):
        optimizer.zero_grad()
        (model(lr) - hr).abs().mean().backward()
        optimizer.step()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_skip_channels_may_differ(kind):
    model = small(kind, 2, 13, out_channels=3, global_skip=False)
    output = model(torch.rand(1, 13, 5, 5))
    assert output.shape == (1, 3, 10, 10)
    assert output.any()  # nothing starts at 0 where there is nothing to add to


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (EDSR(2, num_features=16, num_blocks=3), 18_428),
        (EDSR(4, upsampler="staged"), 1_517_571),
        (EDSR(2, upsampler="staged"), 1_369_859),
        (RRDBNet(4), 16_697_987),
    ],
)
def test_sizes_are_those_of_the_published_models(model, published):
    assert num_parameters(model) == published


def test_residual_scale_scales_each_branch():
    torch.manual_seed(0)
    plain = EDSR(1, num_features=4, num_blocks=1, global_skip=False)
    scaled = EDSR(1, num_features=4, num_blocks=1, global_skip=False, residual_scale=0.5)
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():  # halving the branch is halving the convolution it ends in
        plain.body[0].branch[2].weight.mul_(0.5)
        plain.body[0].branch[2].bias.mul_(0.5)
    lr = torch.rand(1, 3, 6, 6)
    torch.testing.assert_close(scaled(lr), plain(lr))


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_depends_on_every_input_near_it(kind):
    torch.manual_seed(0)
    lr = torch.rand(1, 3, 7, 7, requires_grad=True)
    small(kind, 2, global_skip=False)(lr)[0, :, 6:8, 6:8].sum().backward()
    assert (lr.grad[0, :, 2:5, 2:5] != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_gives_nothing_passes_the_features_on(kind):
    torch.manual_seed(0)
    model = small(kind, 2, global_skip=False)
    seen = []
    model.body.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    (model.upsampling[0] if kind == "rrdbnet" else model.tail).register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    torch.nn.init.zeros_(model.body[-1].weight)
    torch.nn.init.zeros_(model.body[-1].bias)
    model(torch.rand(1, 3, 6, 6))
    arrived = seen[1][..., ::2, ::2] if kind == "rrdbnet" else seen[1]  # there enlarged by repeating
    assert seen[0].any()
    assert torch.equal(arrived, seen[0])


def test_residual_blocks_add_to_their_input():
    features = torch.rand(1, 4, 5, 5)
    dense, nested, plain = DenseBlock(4, 2), ResidualInResidualBlock(4, 2), ResidualBlock(4, 1.0)
    for module in (dense, nested, plain):
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)
    assert torch.equal(dense(features), features)
    assert torch.equal(plain(features), features)
    torch.testing.assert_close(nested(features), 1.2 * features)  # the input, and a fifth of what its blocks pass on


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_forward_compiles_as_one_graph(kind):
    torch.manual_seed(0)
    model = small(kind, 2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for size in ((6, 6), (5, 8)):
        lr = torch.rand(1, 3, *size)
        assert torch.equal(compiled(lr), model(lr))


@pytest.mark.parametrize("scale", range(1, 17))
def test_prime_factors_multiply_to_the_scale(scale):
    factors = prime_factors(scale)
    assert math.prod(factors) == scale
    assert all(factor > 1 and all(factor % d for d in range(2, factor)) for factor in factors)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_are_refused(kind):
    with pytest.raises(ConfigurationError, match=r"`scale` must be a whole number of at least 1, but is 1.5"):
        small(kind, 1.5)
    with pytest.raises(ConfigurationError, match=r"`scale` must be .* but is 0"):
        small(kind, 0)
    with pytest.raises(ConfigurationError, match=r"`in_channels` must be at least 1, but is 0"):
        small(kind, 2, 0)
    with pytest.raises(
        ConfigurationError, match=r"`global_skip` must be False where in_channels=13 and out_channels=3"
    ):
        small(kind, 2, 13, out_channels=3)
    with pytest.raises(ConfigurationError, match=r"`lr` must be \(N, 3, h, w\) .* but is \(1, 1, 5, 5\)"):
        small(kind, 2)(torch.rand(1, 1, 5, 5))


@pytest.mark.parametrize("model", [EDSR, RRDBNet])
@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_model_without_blocks_is_refused(model, num_blocks):
    with pytest.raises(ConfigurationError, match=rf"`num_blocks` must be at least 1, but is {num_blocks}"):
        model(2, num_features=4, num_blocks=num_blocks)


def test_an_unknown_upsampler_is_refused():
    with pytest.raises(ConfigurationError, match=r"`upsampler` must be 'direct' or 'staged', but is 'nearest'"):
        EDSR(2, upsampler="nearest")
