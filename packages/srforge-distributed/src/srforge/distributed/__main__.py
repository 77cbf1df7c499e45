"""The programs of this package: ``python -m srforge.distributed check`` and ``python -m srforge.distributed shim CMD...``."""

import argparse
import sys

from srforge.distributed.errors import SRForgeError


def main(arguments: list[str] | None = None) -> int:
    """Run one of the programs; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m srforge.distributed", description=__doc__)
    programs = parser.add_subparsers(dest="program", required=True)
    check = programs.add_parser(
        "check", help="test the fleet: hosts, devices, collectives, speed; run it under torchrun"
    )
    check.add_argument("--json", action="store_true", help="print the whole report as JSON, on rank 0")
    check.add_argument("--device", default="auto", help="auto, cpu, cuda, ... as in the training script")
    check.add_argument("--backend", default="auto", choices=("auto", "nccl", "gloo"))
    check.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="how long to wait for other ranks"
    )
    check.add_argument("--max-mebibytes", type=float, default=16.0, help="largest message that is timed")
    shim = programs.add_parser("shim", help="run a command in a task of SLURM, Open MPI, MPICH or LSF")
    shim.add_argument("command", nargs=argparse.REMAINDER, help="for example: python train.py")
    asked = parser.parse_args(arguments)
    try:
        if asked.program == "shim":
            from srforge.distributed.shim import run_under_torch_variables

            run_under_torch_variables(asked.command[1:] if asked.command[:1] == ["--"] else asked.command)
        from srforge.distributed.check import check_fleet

        return check_fleet(
            device=asked.device,
            backend=asked.backend,
            timeout=asked.timeout,
            max_mebibytes=asked.max_mebibytes,
            as_json=asked.json,
        )
    except SRForgeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
