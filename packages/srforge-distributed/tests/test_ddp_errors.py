import pytest
import torch
from torch import nn

from srforge.distributed import ConfigurationError, DDPStrategy, Topology
from srforge.distributed.ddp_errors import explained_ddp_errors

UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. ... "
    "Parameter indices which did not receive grad for rank 1: 1 2\n In addition, you can set ..."
)
READY_TWICE = (
    "Expected to mark a variable ready only once. This error is caused by ... "
    "Parameter at index 3 has been marked as ready twice."
)
CHANGED = "Your training graph has changed in this iteration, ... not compatible with static_graph set to True."
FIRST_STEP = 'expect_autograd_hooks_ INTERNAL ASSERT FAILED at "reducer.cpp":1732, please report a bug'
IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation: [...]"


@pytest.fixture
def model():
    """Return a composite whose second part alone has four trainable parameters."""
    strategy = DDPStrategy(Topology.single(), torch.device("cpu"))
    strategy.setup()
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    model.trainable_modules = lambda: dict(model.items())
    yield strategy.prepare(model)
    strategy.teardown()


@pytest.mark.parametrize(
    ("said", "static_graph", "message"),
    [
        (
            UNUSED,
            True,
            r"`static_graph` must be false .* is true \(without gradient here: second.0.bias, second.1.weight\)",
        ),
        (UNUSED, False, r"`find_unused_parameters` must be true .*second.0.bias, second.1.weight.*or freeze"),
        (CHANGED, True, "`static_graph` must be false .* Set `static_graph: false` and `find_unused_parameters: true`"),
        (READY_TWICE, True, r"ready once per backward, but second.1.bias was ready twice.*strategy.unwrap\(part\)"),
        (FIRST_STEP, True, r"must be synced, but was under no_sync. Call rehearse\(model, forward_backward\)"),
        (IN_PLACE, True, "must stay as it was, but was modified in place.*one joint batch"),
    ],
)
def test_error_names_parameters_and_the_cure(model, said, static_graph, message):
    with (
        pytest.raises(ConfigurationError, match=message) as caught,
        explained_ddp_errors(model, static_graph=static_graph),
    ):
        raise RuntimeError(said)
    assert str(caught.value.__cause__) == said


@pytest.mark.parametrize("said", ["CUDA out of memory", "mat1 and mat2 shapes cannot be multiplied"])
def test_other_errors_pass_unchanged(model, said):
    with pytest.raises(RuntimeError, match=said), explained_ddp_errors(model, static_graph=True):
        raise RuntimeError(said)


def test_parameters_without_gradient_are_named_where_ddp_names_none(model):
    for parameter in model["first"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    with (
        pytest.raises(ConfigurationError, match=r"second.0.weight, second.0.bias, second.1.weight, second.1.bias\)"),
        explained_ddp_errors(model, static_graph=True),
    ):
        raise RuntimeError(CHANGED)
