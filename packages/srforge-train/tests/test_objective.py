import pytest
import torch

from srforge.distributed import ConfigurationError
from srforge.training import LinearRamp, Metrics, Objective, Term
from srforge.training.objective import mean_of


def per_sample(prediction, target):
    return (prediction - target).abs().mean(dim=1)


PREDICTION = torch.tensor([[1.0, 3.0], [5.0, 5.0]], requires_grad=True)
BATCH = {"hr": torch.tensor([[0.0, 0.0], [4.0, 5.0]]), "mask": torch.tensor([True, False])}


def test_the_total_is_the_weighted_sum_of_the_terms_means():
    objective = Objective(
        {
            "l1": Term(function=per_sample, weight=2.0),
            "mean": Term(function=lambda p, t: p.mean(), weight=0.5),
            "reported": Term(function=lambda p, t: p.detach().mean(), weight=0.0),
        }
    )
    values = objective(PREDICTION, BATCH)
    # l1: (2 + 0.5) / 2 = 1.25; mean: 3.5
    assert float(values.total().detach()) == pytest.approx(2 * 1.25 + 0.5 * 3.5)
    assert values.without_gradient() == []


def test_bands_are_compared_band_by_band_and_averaged():
    prediction = {"red": torch.tensor([2.0, 2.0]), "nir": torch.tensor([5.0, 7.0])}
    target = {"nir": torch.tensor([5.0, 5.0]), "red": torch.tensor([0.0, 1.0])}
    values = Objective({"l1": lambda p, t: (p - t).abs()})(prediction, {"hr": target})
    assert {band: v.tolist() for band, v in values["l1"].items()} == {"red": [2.0, 1.0], "nir": [0.0, 2.0]}
    assert float(values.total()) == pytest.approx((1.5 + 1.0) / 2)


def test_a_shared_argument_goes_to_every_band():
    term = Term(function=lambda p, m: (p * m).sum(), keys=("prediction", "mask"))
    value = term.evaluate({"a": torch.ones(2), "b": 2 * torch.ones(2)}, {"mask": torch.tensor([1.0, 0.0])})
    assert {band: float(v) for band, v in value.items()} == {"a": 1.0, "b": 2.0}


def test_a_function_may_take_the_whole_mapping():
    term = Term(function=lambda p, t: p["a"] - t["a"], per_band=False)
    assert term.evaluate({"a": torch.tensor(3.0)}, {"hr": {"a": torch.tensor(1.0)}}).item() == 2.0


def test_a_masked_term_is_the_mean_over_what_the_mask_keeps():
    assert float(mean_of("m", (torch.tensor(6.0), torch.tensor(4.0)))) == 1.5
    assert float(mean_of("m", (torch.tensor(0.0), torch.tensor(0.0)))) == 0.0
    assert float(mean_of("m", (torch.tensor(1.0), torch.tensor(0.25)))) == 4.0, "a soft mask counts to less than 1"


def test_a_weight_may_depend_on_the_epoch():
    objective = Objective({"l1": Term(function=per_sample, weight=lambda epoch: 0.1 * epoch)})
    assert float(objective(PREDICTION, BATCH, epoch=3).total().detach()) == pytest.approx(0.3 * 1.25)


def test_a_scheduled_term_stays_in_the_graph_while_its_weight_is_0():
    head = torch.nn.Parameter(torch.ones(()))
    terms = {"l1": per_sample, "later": Term(function=lambda p, t: head * p.mean(), weight=LinearRamp(0.0, 1.0, 4))}
    Objective(terms)(PREDICTION, BATCH, epoch=0).total().backward()
    assert head.grad is not None
    assert float(head.grad) == 0.0
    assert [LinearRamp(0.0, 1.0, 4)(epoch) for epoch in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]


def test_hooks_may_replace_a_value_and_add_a_term():
    values = Objective({"l1": Term(function=per_sample, weight=2.0)})(PREDICTION, BATCH)
    values["l1"] = torch.tensor(1.0)
    values.add("extra", torch.tensor(10.0), weight=0.1)
    assert float(values.total()) == pytest.approx(2.0 + 1.0)
    assert list(values) == ["l1", "extra"]


def test_terms_without_gradient_are_named():
    objective = Objective({"l1": per_sample, "dead": lambda p, t: per_sample(p.detach(), t)})
    assert objective(PREDICTION, BATCH).without_gradient() == ["dead"]


def test_metrics_keep_no_gradient():
    assert not Metrics({"l1": per_sample})(PREDICTION, BATCH)["l1"].requires_grad


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16])
def test_hits_and_counts_have_means(dtype):
    assert float(mean_of("hits", torch.tensor([1, 0, 1, 1]).to(dtype))) == 0.75
    assert float(mean_of("hit", torch.tensor(1).to(dtype))) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective({}), "at least one term"),
        (lambda: LinearRamp(0.0, 1.0, 0), "`num_epochs` must be above 0"),
        (
            lambda: Objective({"a": lambda p, t: p})(PREDICTION, BATCH).total(),
            r"Term `a` must return .* shape \(2, 2\)",
        ),
        (
            lambda: Objective({"a": lambda p, t: 1.0})(PREDICTION, BATCH).total(),
            "Term `a` must return .* but returned float",
        ),
        (lambda: mean_of("a", (3.0, 2)), r"Term `a` must return .* a pair .* but returned tuple \(3.0, 2\)"),
        (lambda: mean_of("a", {}), "Term `a` must return .* but returned dict"),
        (lambda: mean_of("a", torch.zeros(2, dtype=torch.complex64)), "Term `a` must return real .*complex64"),
        (lambda: Objective({"a": per_sample})(PREDICTION, [PREDICTION]), "needs `hr`, but the batch is a list"),
        (
            lambda: Objective({"a": Term(function=per_sample, weight=0.0)})(PREDICTION, BATCH).total(),
            "weight other than 0",
        ),
        (lambda: Objective({"a": Term(function=per_sample, keys=("prediction", "gt"))})(PREDICTION, BATCH), "`gt`.*hr"),
        (
            lambda: Objective({"a": per_sample})({"a": PREDICTION}, {"hr": {"b": PREDICTION}}),
            "bands of .* must be the same",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
