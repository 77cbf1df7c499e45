"""A script under ``rank_entrypoint`` that fails on its last rank in the way that its first argument names."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from srforge.distributed import ConfigurationError, on_exit, rank_entrypoint

# A shell's background job starts with SIGINT ignored, and what is ignored stays so.
signal.signal(signal.SIGINT, signal.default_int_handler)


def fail(how):
    if how == "raise":
        raise ValueError("the batch is bad")
    if how == "configuration":
        raise ConfigurationError("`batch_size` must be > 0, but is 0. Raise it.")
    if how == "exit":
        sys.exit(0)
    if how == "kill":
        os.kill(os.getpid(), 9)
    while how == "loop":
        pass


@rank_entrypoint
def main():
    how, folder = sys.argv[1], Path(sys.argv[2])
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_exit(lambda code: (folder / f"finished-{rank}").write_text(str(code)))
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        dist.barrier()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == world_size - 1:
        fail(how)
    if world_size > 1 and how != "end":
        dist.barrier()  # the others wait here for the rank that failed
    elif how != "end":
        time.sleep(60)


if len(sys.argv) > 3 and sys.argv[3] == "hydra":
    import hydra
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    how_and_folder = sys.argv[1:3]
    ConfigStore.instance().store(name="empty", node=OmegaConf.create({}))

    @hydra.main(version_base="1.3", config_path=None, config_name="empty")
    def with_hydra(_config):
        sys.argv[1:] = how_and_folder
        main()

    sys.argv[1:] = ["hydra.run.dir=" + how_and_folder[1], "hydra.output_subdir=null", "hydra/job_logging=disabled"]
    with_hydra()
else:
    main()
