import re
from pathlib import Path

from srforge.distributed import environment_variables
from srforge.distributed.environment_variables import error_file, job_name, num_restarts

PACKAGE = Path(environment_variables.__file__).parent


def test_error_file_is_the_launchers_or_none(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/somewhere/error.json")
    assert error_file() == "/somewhere/error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    assert error_file() is None
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert error_file() is None


def test_the_environment_is_read_here_and_in_topology_alone():
    readers = {
        path.name for path in PACKAGE.rglob("*.py") if re.search(r"os\.(environ|getenv)", path.read_text("utf-8"))
    }
    assert readers == {"environment_variables.py", "topology.py"}


def test_every_constant_is_documented():
    lines = Path(environment_variables.__file__).read_text("utf-8").splitlines()
    constants = [i for i, line in enumerate(lines) if re.match(r"[A-Z_]+ = ", line)]
    assert constants
    assert all(lines[i - 1].startswith("#: ") or lines[i - 1].startswith("#:") for i in constants)


def test_a_job_keeps_its_name_and_counts_its_restarts(monkeypatch):
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert (job_name(), num_restarts()) == ("", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert (job_name(), num_restarts()) == ("run", 2)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert (job_name(), num_restarts()) == ("run 17", 3)


def test_jobs_without_an_id_are_told_apart_by_their_torchrun_but_not_across_requeues(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    names = set()
    for launcher in (100, 200, 100):
        monkeypatch.setattr("os.getppid", lambda launcher=launcher: launcher)
        names.add(job_name())
    assert len(names) == 2
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert job_name() == "none 17"
