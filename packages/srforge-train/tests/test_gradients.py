import pytest
import torch
from torch import nn

from srforge.training import NonFiniteGradientError
from srforge.training.gradients import FiniteGuard, clip_gradients, refuse_vanished_scale, takes_found_inf

CPU = torch.device("cpu")


def parameters(*gradients):
    made = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient.clone()
    return made


def test_the_norm_is_over_all_parameters_and_before_clipping():
    made = parameters(torch.tensor([3.0]), torch.tensor([[4.0]]))
    made.append(nn.Parameter(torch.zeros(2)))  # one without a gradient is left out
    assert float(clip_gradients(made, None)) == 5.0
    assert made[0].grad.item() == 3.0
    assert float(clip_gradients(made, 1.0)) == 5.0
    assert [p.grad.item() for p in made[:2]] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_a_gradient_below_the_limit_is_left_as_it_is():
    made = parameters(torch.tensor([0.3]))
    clip_gradients(made, 1.0)
    assert made[0].grad.item() == pytest.approx(0.3, rel=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_raise_tells_where_and_only_once_it_is_asked(bad):
    guard, optimizer = FiniteGuard("raise", CPU), torch.optim.SGD(parameters(torch.ones(1)), lr=0.1)
    assert guard.allows_step(torch.tensor(bad), optimizer)
    assert guard.allows_step(torch.tensor(1.0), optimizer)
    with pytest.raises(NonFiniteGradientError, match="training epoch 3"):
        guard.raise_if_broken("training epoch 3")


def test_raise_does_not_wait_for_the_end_of_a_long_epoch():
    guard, optimizer = FiniteGuard("raise", CPU), torch.optim.SGD(parameters(torch.ones(1)), lr=0.1)
    norms = [float("nan") if step == 10 else 1e38 for step in range(1000)]
    taken = []

    def train():
        for norm in norms:
            guard.allows_step(torch.tensor(norm), optimizer)
            taken.append(norm)

    with pytest.raises(NonFiniteGradientError, match="in the last 128 steps"):
        train()
    assert 10 < len(taken) < 130


def test_ignore_lets_everything_pass():
    guard = FiniteGuard("ignore", CPU)
    assert guard.allows_step(torch.tensor(float("nan")), torch.optim.SGD(parameters(torch.ones(1)), lr=0.1))
    guard.raise_if_broken("anywhere")


@pytest.mark.parametrize("fused", [False, True])
def test_skip_leaves_weights_and_optimizer_state_as_they_were(fused):
    made = parameters(torch.tensor([1.0]))
    optimizer = torch.optim.Adam(made, lr=0.1, fused=fused)
    guard = FiniteGuard("skip", CPU)
    assert takes_found_inf(optimizer) == fused

    def step(gradient):
        made[0].grad = torch.tensor([gradient])
        if guard.allows_step(clip_gradients(made, None), optimizer):
            optimizer.step()

    step(1.0)
    before = made[0].item(), {k: v.clone() for k, v in optimizer.state[made[0]].items()}
    step(float("nan"))
    assert made[0].item() == before[0]
    for name, value in before[1].items():
        assert torch.equal(optimizer.state[made[0]][name], value), name
    step(1.0)
    assert made[0].item() < before[0]
    assert float(guard.take_num_skipped()) == 1.0
    assert float(guard.take_num_skipped()) == 0.0


def test_a_scalers_skips_are_counted_without_a_decision():
    guard = FiniteGuard("count", CPU)
    optimizer = torch.optim.SGD(parameters(torch.ones(1)), lr=0.1)
    assert all(guard.allows_step(torch.tensor(norm), optimizer) for norm in (1.0, float("inf"), float("nan")))
    guard.raise_if_broken("anywhere")
    assert float(guard.take_num_skipped()) == 2.0


def test_a_sparse_gradient_has_the_norm_of_its_dense_form_and_is_clipped():
    indices, values = torch.tensor([[1, 1, 3]]), torch.tensor([[1.0], [2.0], [4.0]])
    sparse = nn.Parameter(torch.zeros(5, 1))
    sparse.grad = torch.sparse_coo_tensor(indices, values, (5, 1), check_invariants=True)
    assert float(clip_gradients([sparse], 1.0)) == 5.0  # rows (1 + 2, 4)
    assert sparse.grad.to_dense().flatten().tolist() == pytest.approx([0, 0.6, 0, 0.8, 0], rel=1e-5)


def test_a_scale_that_overflow_cannot_explain_ends_the_run_unless_it_is_to_go_on():
    scaler = torch.amp.GradScaler("cpu", init_scale=1e-5)
    scaler.scale(torch.ones(1))  # makes the scale
    refuse_vanished_scale(scaler, "skip", "anywhere")
    refuse_vanished_scale(torch.amp.GradScaler("cpu", enabled=False), "raise", "anywhere")
    with pytest.raises(
        NonFiniteGradientError, match=r"scale must stay above 0.0001, but is 1.0e-05 in training epoch 3"
    ):
        refuse_vanished_scale(scaler, "raise", "training epoch 3")
