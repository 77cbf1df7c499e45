"""Variables of schedulers as they were seen, or as their manuals say; real launchers run in tests-integration."""

import pytest

from srforge.distributed import LaunchEnvironmentError, shim
from srforge.distributed.shim import first_host, torch_variables

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
LSF = {"JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "0"}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[05-08]",
}


def contract(rank, local_rank, world_size, local_world_size, address, port):
    told = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    told |= {"MASTER_ADDR": address}
    told |= {} if local_world_size is None else {"LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(value) for name, value in told.items()}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**OPEN_MPI, "MASTER_ADDR": "n0"}, contract(3, 1, 4, 2, "n0", 29500)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, contract(3, 1, 4, 4, "127.0.0.1", 29500)),
        ({**MPICH, "MASTER_ADDR": "n0", "MASTER_PORT": "4000"}, contract(1, 1, 4, 2, "n0", 4000)),
        ({**MPICH, "MPI_LOCALNRANKS": "4"}, contract(1, 1, 4, 4, "127.0.0.1", 29500)),
        ({**LSF, "MASTER_ADDR": "n0"}, contract(2, 0, 4, None, "n0", 29500)),
        (SLURM, contract(5, 1, 7, 3, "gpu07", 24567)),
        ({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, contract(5, 1, 7, 3, "10.0.0.1", 1)),
        # mpirun in an allocation of SLURM, and srun with a PMI plugin
        ({**SLURM, **OPEN_MPI, "MASTER_ADDR": "n0"}, contract(3, 1, 4, 2, "n0", 29500)),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}, contract(5, 1, 7, 3, "gpu07", 24567)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, contract(0, 0, 1, None, "127.0.0.1", 29500)),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n"},
            contract(1, 1, 2, None, "n", 29500),
        ),
    ],
)
def test_scheduler_s_variables_become_the_torch_contract(environ, expected):
    assert torch_variables(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no variable of these is set. Put srun"),
        (OPEN_MPI, r"MASTER_ADDR must be exported, but is missing: Open MPI tells no address.*mpirun -x MASTER_ADDR"),
        (MPICH, r"MASTER_ADDR must be exported, but is missing: MPICH.*mpiexec -genv MASTER_ADDR"),
        (LSF, "MASTER_ADDR must be exported, but is missing: LSF"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n"}, "LOCAL_RANK must be exported in every task"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "must run in a step of SLURM.*Put srun before"),
        ({**SLURM, "SLURM_LOCALID": ""}, "SLURM_LOCALID must be set where SLURM starts the task"),
        ({**OPEN_MPI, "MASTER_ADDR": "n0", "RANK": "0"}, "RANK must be 3, as Open MPI says, but is '0' already"),
        (
            {**OPEN_MPI, "MASTER_ADDR": "n0", "OMPI_COMM_WORLD_RANK": "9"},
            r"RANK must be in \[0, WORLD_SIZE=4\), but is 9",
        ),
        ({**OPEN_MPI, "MASTER_ADDR": "n0", "MASTER_PORT": "x"}, r"MASTER_PORT must be in \[1, 65535\]"),
    ],
)
def test_nothing_is_guessed(environ, message):
    with pytest.raises(LaunchEnvironmentError, match=message):
        torch_variables(environ)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[01-03,07]", "node01"),
        ("gpu[3,5]-ib,login1", "gpu3-ib"),
        ("a,b[1-2]", "a"),
        ("rack[2-3]node[05-08]", "rack2node05"),
        ("n-1.site", "n-1.site"),
    ],
)
def test_first_host_of_a_compressed_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("tasks", "node", "count"),
    [("4", "0", "4"), ("4(x2),3", "1", "4"), ("4(x2),3", "2", "3"), ("2", "1", None), ("", "0", None)],
)
def test_tasks_of_a_node_are_read_from_slurm_s_counts(tasks, node, count):
    assert shim._tasks_of_node(tasks, node) == count


def test_command_takes_the_place_of_the_shim(monkeypatch):
    seen = []
    monkeypatch.setattr(shim, "whole_environment", lambda: {**MPICH, "MASTER_ADDR": "n0", "PATH": "/bin"})
    monkeypatch.setattr(shim.os, "execvpe", lambda *call: seen.append(call))
    shim.run_under_torch_variables(["python", "train.py", "--x"])
    program, command, environ = seen[0]
    assert (program, command) == ("python", ["python", "train.py", "--x"])
    assert environ["RANK"] == "1"
    assert environ["PATH"] == "/bin"


def test_shim_refuses_no_command_and_one_that_is_not_there(monkeypatch):
    with pytest.raises(LaunchEnvironmentError, match="must be given a command, but has none"):
        shim.run_under_torch_variables([])
    monkeypatch.setattr(shim, "whole_environment", lambda: {**MPICH, "MASTER_ADDR": "n0"})
    with pytest.raises(LaunchEnvironmentError, match=r"`/nowhere/python` must be a program.*No such file"):
        shim.run_under_torch_variables(["/nowhere/python"])


def test_jobs_and_steps_of_a_job_that_share_a_host_have_ports_of_their_own():
    places = [(job, step) for job in ("1234567", "1234568") for step in ("0", "1", "2")]
    ports = {
        torch_variables({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step})["MASTER_PORT"] for job, step in places
    }
    assert len(ports) == len(places)
    assert all(20000 <= int(port) < 30000 for port in ports)
