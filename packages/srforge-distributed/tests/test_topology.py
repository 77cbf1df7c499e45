import pytest
from hypothesis import given
from hypothesis import strategies as st

from srforge.distributed import LaunchEnvironmentError, Topology
from srforge.distributed.announcements import say_once
from srforge.distributed.environment_variables import SCHEDULER_TASK_COUNTS

LAUNCHED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def test_unset_or_one_is_one_process():
    assert Topology.from_environment({}) == Topology.single()
    assert Topology.from_environment({"WORLD_SIZE": "1"}) == Topology.single()
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert Topology.from_environment(torchrun) == Topology.single()


def test_launcher_variables_are_taken_as_they_are():
    assert Topology.from_environment(LAUNCHED) == Topology(5, 1, 8, 4, "node-0", 29500)


def test_local_world_size_is_optional():
    environ = {name: value for name, value in LAUNCHED.items() if name != "LOCAL_WORLD_SIZE"}
    assert Topology.from_environment(environ).local_world_size is None


def test_missing_local_rank_is_0_and_said_once(caplog):
    say_once.cache_clear()
    environ = {name: value for name, value in LAUNCHED.items() if not name.startswith("LOCAL_")}
    assert Topology.from_environment(environ).local_rank == 0
    assert Topology.from_environment(environ).local_rank == 0
    assert [record.message for record in caplog.records] == [
        "LOCAL_RANK is not set: using 0, as for one process per host."
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, r"RANK must be in \[0, WORLD_SIZE=8\), but is 8. Launch with torchrun"),
        ({"RANK": "-1"}, r"RANK must be in \[0, WORLD_SIZE=8\), but is -1"),
        ({"RANK": None}, r"RANK must be in \[0, WORLD_SIZE=8\), but is missing"),
        ({"RANK": "two"}, r"RANK must be in \[0, WORLD_SIZE=8\), but is 'two'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be an integer >= 1, but is ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer >= 1, but is 0"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE must be an integer >= 1, but is '2.0'"),
        ({"WORLD_SIZE": "1"}, "RANK must be 0 when WORLD_SIZE is 1, but is 5"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE must be set when RANK is 5, but is missing"),
        ({"LOCAL_RANK": "4"}, r"LOCAL_RANK must be in \[0, LOCAL_WORLD_SIZE=4\), but is 4"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": None}, r"LOCAL_RANK must be in \[0, WORLD_SIZE=8\), but is 8"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK must be set when LOCAL_WORLD_SIZE is 4, but is missing"),
        ({"LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE must be in \[1, WORLD_SIZE=8\], but is 9"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR must be the host name or address of rank 0, but is missing"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR must be the host name or address of rank 0, but is ' '"),
        ({"MASTER_PORT": None}, r"MASTER_PORT must be in \[1, 65535\], but is missing"),
        ({"MASTER_PORT": "65536"}, r"MASTER_PORT must be in \[1, 65535\], but is 65536"),
        ({"MASTER_PORT": "0"}, r"MASTER_PORT must be in \[1, 65535\], but is 0"),
    ],
)
def test_error_names_variable_value_and_cure(changes, message):
    environ = {name: value for name, value in (LAUNCHED | changes).items() if value is not None}
    with pytest.raises(LaunchEnvironmentError, match=message):
        Topology.from_environment(environ)


@pytest.mark.parametrize("name", SCHEDULER_TASK_COUNTS)
def test_scheduler_tasks_without_world_size_are_refused_with_the_shim(name):
    cure = r"python -m srforge.distributed shim.*strategy: single"
    with pytest.raises(LaunchEnvironmentError, match=rf"WORLD_SIZE must be set .*\({name}=4\).*{cure}"):
        Topology.from_environment({name: "4"})
    assert Topology.from_environment({name: "1"}) == Topology.single()
    assert Topology.from_environment({name: ""}) == Topology.single()
    assert Topology.from_environment({**LAUNCHED, name: "8"}).world_size == 8
    with pytest.raises(LaunchEnvironmentError, match=f"{name} must be an integer, but is 'many'"):
        Topology.from_environment({name: "many"})


def test_process_group_decides_rank_and_size():
    assert Topology.from_environment({}, group=(3, 4)) == Topology(3, 0, 4)
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Topology.from_environment(told, group=(3, 4)) == Topology(3, 1, 4, 2)
    assert Topology.from_environment({}, group=(0, 1)) == Topology.single()
    with pytest.raises(
        LaunchEnvironmentError, match="WORLD_SIZE must be 2, as in the existing process group, but is 4"
    ):
        Topology.from_environment({"WORLD_SIZE": "4"}, group=(0, 2))


NUMBERS = st.one_of(
    st.integers(-2, 10).map(str),
    st.integers(0, 3).map(str),
    st.sampled_from(["", " ", "1_0", "٣", "0x2", "1e1", "+1", " 2 ", "70000", "nan"]),
)
NAMES = [*LAUNCHED, *SCHEDULER_TASK_COUNTS]


@given(st.dictionaries(st.sampled_from(NAMES), NUMBERS))
def test_any_environment_gives_a_valid_topology_or_an_error_that_names_a_variable(environ):
    try:
        topology = Topology.from_environment(environ)
    except LaunchEnvironmentError as error:
        assert any(name in str(error) for name in NAMES)  # noqa: PT017 - both outcomes are allowed
        return
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        assert topology == Topology.single()
        return
    assert topology.world_size == int(environ["WORLD_SIZE"]) > 1
    assert topology.rank == int(environ["RANK"])
    assert 0 <= topology.rank < topology.world_size
    assert topology.local_rank == int(environ.get("LOCAL_RANK", "0"))
    assert 0 <= topology.local_rank < (topology.local_world_size or topology.world_size)
    assert topology.master_addr == environ["MASTER_ADDR"].strip() != ""
    assert topology.master_port == int(environ["MASTER_PORT"]) in range(1, 65536)


@given(st.integers(2, 64), st.data())
def test_every_consistent_environment_is_accepted(world_size, data):
    rank = data.draw(st.integers(0, world_size - 1))
    local_world_size = data.draw(st.integers(1, world_size))
    local_rank = data.draw(st.integers(0, local_world_size - 1))
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    environ = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "h", "MASTER_PORT": "65535"}
    assert Topology.from_environment(environ) == Topology(rank, local_rank, world_size, local_world_size, "h", 65535)
