import asyncio
import functools
import inspect
import pickle

import pytest
import torch

from srforge.distributed.active import set_active_strategy
from srforge.distributed.errors import CollectiveError, ConfigurationError
from srforge.distributed.gates import every_rank, is_main_process, main_process_only
from srforge.distributed.metric_tree import MetricSum
from srforge.distributed.testing import FakeStrategy


@pytest.fixture(autouse=True)
def _restore():
    yield
    set_active_strategy(None)


def runs_on(call, world_size=3):
    """Ranks on which the call does not give None."""
    ranks = []
    for rank in range(world_size):
        set_active_strategy(FakeStrategy(rank, world_size))
        if call() is not None:
            ranks.append(rank)
    return ranks


def marks(function):
    """A decorator of the kind that only leaves a mark, as ``@hooks_into`` does."""
    function.__point__ = "on_post_step"
    return function


@main_process_only
def write(path, *, mode: str = "w") -> str:
    """Write."""
    return f"{path}:{mode}"


@main_process_only
class Logger:
    level = 3
    make = dict

    def __init__(self):
        self.seen = 0

    def __call__(self):
        return "call"

    def write(self, value=1):
        self.seen += value
        return self.seen

    @staticmethod
    def static():
        return "static"

    @classmethod
    def name(cls):
        return cls.__name__

    async def upload(self):
        return "uploaded"

    write_two = functools.partialmethod(write, 2)

    @functools.lru_cache  # noqa: B019 - the object lives as long as the test
    def cached(self):
        return "cached"

    @property
    def total(self):
        return self.seen

    def _private(self):
        return "private"

    @every_rank
    def load(self):
        return "loaded"


def test_main_process_is_rank_0():
    assert is_main_process()
    assert runs_on(lambda: is_main_process() or None) == [0]


def test_function_runs_on_rank_0_only_decided_at_call_time():
    assert runs_on(lambda: write("a")) == [0]
    set_active_strategy(FakeStrategy(0, 1))
    assert write("a", mode="x") == "a:x"


def test_name_documentation_signature_and_pickling_are_kept():
    assert (write.__name__, write.__doc__) == ("write", "Write.")
    assert list(inspect.signature(write).parameters) == ["path", "mode"]
    assert pickle.loads(pickle.dumps(write)) is write
    logger = pickle.loads(pickle.dumps(Logger()))
    assert type(logger) is Logger
    assert str(inspect.signature(Logger.write)) == "(self, value=1)"
    assert pickle.loads(pickle.dumps(logger.write))() == 1


@pytest.mark.parametrize("call", ["write", "static", "name", "write_two", "cached"])
def test_class_gate_covers_every_public_method(call):
    logger = Logger()
    assert runs_on(getattr(logger, call)) == [0]


def test_class_gate_covers_static_and_class_methods_through_the_class():
    assert runs_on(Logger.static) == [0]
    assert runs_on(Logger.name) == [0]
    set_active_strategy(None)
    assert Logger.name() == "Logger"


@pytest.mark.parametrize("call", ["__call__", "_private", "load", "make"])
def test_class_gate_leaves_private_dunder_and_exempt_methods(call):
    logger = Logger()
    assert runs_on(getattr(logger, call)) == [0, 1, 2]


def test_class_gate_leaves_constructor_attributes_and_properties():
    assert runs_on(lambda: Logger().total) == [0, 1, 2]
    assert runs_on(lambda: Logger().level) == [0, 1, 2]


def test_async_functions_stay_async():
    logger = Logger()
    assert inspect.iscoroutinefunction(Logger.upload)
    assert runs_on(lambda: asyncio.run(logger.upload())) == [0]


def test_async_collective_inside_a_gate_is_refused_and_the_gate_closes():
    @main_process_only
    async def upload(strategy):
        await asyncio.sleep(0)
        strategy.barrier()

    async def main(strategy):
        with pytest.raises(CollectiveError, match=r"`barrier` must be called on every rank, .* inside `.*upload`"):
            await upload(strategy)
        strategy.barrier()

    strategy = FakeStrategy(0, 2)
    set_active_strategy(strategy)
    asyncio.run(main(strategy))
    assert strategy.calls == ["barrier"]


@pytest.mark.parametrize("mark_first", [True, False])
def test_marks_of_other_decorators_survive_in_either_order(mark_first):
    def handler(self):
        return 1

    gated = main_process_only(marks(handler)) if mark_first else marks(main_process_only(handler))
    assert gated.__point__ == "on_post_step"
    assert runs_on(lambda: gated(None)) == [0]


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
@pytest.mark.parametrize("gate_first", [True, False])
def test_static_and_class_methods_are_gated_in_either_order(kind, gate_first):
    def handler(*_args):
        return 1

    method = kind(main_process_only(handler)) if gate_first else main_process_only(marks(kind(handler)))
    cls = type("Owner", (), {"method": method})
    assert runs_on(cls.method) == [0]
    assert runs_on(cls().method) == [0]
    assert gate_first or vars(cls)["method"].__point__ == "on_post_step"


def test_gating_twice_is_gating_once():
    assert main_process_only(write) is write
    before = dict(vars(Logger))
    assert main_process_only(Logger) is Logger
    assert {name: vars(Logger)[name] for name in ("write", "upload")} == {n: before[n] for n in ("write", "upload")}


def test_a_decorator_above_a_gate_is_gated_itself():
    calls = []

    @main_process_only
    def inner():
        return 1

    @functools.wraps(inner)
    def outer():
        calls.append(1)
        return inner()

    assert runs_on(main_process_only(outer)) == [0]
    assert len(calls) == 1


class Base:
    def handler(self):
        return "base"

    @classmethod
    def build(cls):
        return cls.__name__

    @staticmethod
    def static():
        return "static"

    async def upload(self):
        return "up"

    @every_rank
    def load(self):
        return "load"


@main_process_only
class Child(Base):
    def load(self):
        return super().load()


def test_inherited_methods_are_gated_on_the_class_and_not_on_its_base():
    child, base = Child(), Base()
    for name in ("handler", "build", "static"):
        assert runs_on(getattr(child, name)) == [0]
        assert runs_on(getattr(base, name)) == [0, 1, 2]
    assert runs_on(lambda: asyncio.run(child.upload())) == [0]
    assert inspect.iscoroutinefunction(Child.upload)
    set_active_strategy(None)
    assert Child.build() == "Child"


def test_exemption_holds_for_overrides():
    assert runs_on(Child().load) == [0, 1, 2]


def test_gate_on_inherited_methods_does_not_shadow_another_base():
    class Sibling(Base):
        def handler(self):
            return "sibling"

    class Both(Child, Sibling):
        pass

    assert Both().handler() == "sibling"


def test_override_in_a_subclass_is_ungated_until_decorated():
    class Grandchild(Child):
        def handler(self):
            return super().handler() or "mine"

    assert runs_on(Grandchild().handler) == [0, 1, 2]
    main_process_only(Grandchild)
    assert runs_on(Grandchild().handler) == [0]


def test_properties_are_refused_with_the_reason():
    for kind in (property, functools.cached_property):
        with pytest.raises(ConfigurationError, match="is on a property: reading it would give None"):
            main_process_only(kind(lambda self: 1))


def test_generators_are_refused_with_the_reason():
    def rows():
        yield 1

    async def arows():
        yield 1

    for function in (rows, arows):
        with pytest.raises(ConfigurationError, match=r"`.*rows` is a generator function"):
            main_process_only(function)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ConfigurationError, match="must mark a function, a method or a class, but is on a int"):
        main_process_only(3)
    with pytest.raises(ConfigurationError, match="singledispatchmethod"):
        main_process_only(functools.singledispatchmethod(lambda self, x: x))


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("all_gather", (torch.zeros(1),)),
        ("all_gather_object", (1,)),
        ("broadcast_object", (1,)),
        ("barrier", ()),
        ("reduce_metrics", ({"a": MetricSum(1, 1)},)),
    ],
)
def test_collective_inside_a_gate_is_refused_by_both_names(operation, arguments):
    strategy = FakeStrategy(0, 2)
    set_active_strategy(strategy)

    @main_process_only
    def save():
        getattr(strategy, operation)(*arguments)

    with pytest.raises(CollectiveError, match=f"`{operation}` must be called on every rank, .* inside `.*save`"):
        save()
    getattr(strategy, operation)(*arguments)


def test_collective_inside_a_gate_is_fine_with_one_process():
    strategy = FakeStrategy(0, 1)
    set_active_strategy(strategy)
    main_process_only(strategy.barrier)()
    assert strategy.calls == ["barrier"]
