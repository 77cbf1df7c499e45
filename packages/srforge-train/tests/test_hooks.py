import pytest

from srforge.distributed import ConfigurationError, main_process_only, set_active_strategy
from srforge.distributed.testing import FakeStrategy
from srforge.training import Hook, hooks_into
from srforge.training.hooks import RUNNER_POINTS, HookPoints


class Recorder(Hook):
    def __init__(self, log, name="hook"):
        self.log, self.name, self.count = log, name, 0

    @hooks_into("on_pre_step", "on_post_step")
    def record(self, context):
        self.count += 1
        self.log.append((self.name, context))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def points():
    return HookPoints("TrainingRunner", RUNNER_POINTS)


def test_handlers_run_in_attach_order_at_their_points_only():
    log, fired = [], points()
    for name in ("first", "second"):
        fired.attach(Recorder(log, name))
    fired.fire("on_pre_step", 1)
    fired.fire("on_epoch_start", 2)
    fired.fire("on_post_step", 3)
    assert log == [("first", 1), ("second", 1), ("first", 3), ("second", 3)]


def test_an_override_keeps_its_points_and_runs_once():
    class Child(Recorder):
        def record(self, context):
            super().record(("child", context))

    log, fired = [], points()
    fired.attach(Child(log))
    fired.fire("on_post_step", 1)
    assert log == [("hook", ("child", 1))]


@pytest.mark.parametrize("rank", [0, 1])
def test_gates_work_in_either_order_on_methods_and_classes(rank):
    class Mixed(Hook):
        def __init__(self):
            self.seen = []

        @main_process_only
        @hooks_into("on_pre_step")
        def gate_outside(self, context):
            self.seen.append("outside")

        @hooks_into("on_pre_step")
        @main_process_only
        def gate_inside(self, context):
            self.seen.append("inside")

        @hooks_into("on_pre_step")
        def everywhere(self, context):
            self.seen.append("everywhere")

    @main_process_only
    class Gated(Mixed):
        pass

    set_active_strategy(FakeStrategy(rank, 2))
    try:
        mixed, gated, fired = Mixed(), Gated(), points()
        fired.attach(mixed)
        fired.attach(gated)
        fired.fire("on_pre_step", None)
    finally:
        set_active_strategy(None)
    assert mixed.seen == (["outside", "inside", "everywhere"] if rank == 0 else ["everywhere"])
    assert gated.seen == (["outside", "inside", "everywhere"] if rank == 0 else [])


def test_state_returns_to_the_hook_it_came_from():
    log = []
    old, new = points(), points()
    for fired in (old, new):
        for name in ("a", "b"):
            fired.attach(Recorder(log, name))
    old.hooks[1].count = 7
    new.load_state_dict(old.state_dict())
    assert [hook.count for hook in new.hooks] == [0, 7]


def test_state_of_a_hook_that_is_gone_is_refused_by_name():
    old, new = points(), points()
    old.attach(Recorder([]))
    with pytest.raises(ConfigurationError, match=r"0\.Recorder of TrainingRunner"):
        new.load_state_dict(old.state_dict())


def refused(body):
    class Bad(Hook):
        handler = hooks_into("on_post_step")(body)

    return Bad


def unknown_point():
    class Bad(Hook):
        @hooks_into("on_post_stp")
        def handler(self, context):
            pass

    return Bad()


def no_handler():
    class Bad(Hook):
        def on_post_step(self, context):
            pass

    return Bad()


def test_a_gated_hook_has_its_state_on_every_rank():
    gated = main_process_only(Recorder)
    set_active_strategy(FakeStrategy(1, 2))
    try:
        fired = points()
        fired.attach(gated([]))
        fired.load_state_dict({"0.Recorder": {"count": 4}})
        assert fired.state_dict() == {"0.Recorder": {"count": 4}}
    finally:
        set_active_strategy(None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (unknown_point, "names 'on_post_stp'. Did you mean on_post_step"),
        (no_handler, "must have a handler"),
        (object, "must derive from Hook"),
        (refused(lambda self: None), "exactly one argument"),
        (refused(lambda self, context, more: None), "exactly one argument"),
    ],
)
def test_what_could_never_fire_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        points().attach(make())


def test_a_hook_is_attached_once():
    fired, hook = points(), Recorder([])
    fired.attach(hook)
    with pytest.raises(ConfigurationError, match="attached already"):
        fired.attach(hook)


def test_a_point_must_be_named():
    with pytest.raises(ConfigurationError, match="names of points"):
        hooks_into()
