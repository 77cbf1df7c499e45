"""Faults for ``apps/train.py``, planted from outside: the packages know nothing of them.

``TEST_FAULT`` says which: ``how:phase:rank``. The process that fails notes the time in ``TEST_NOTES`` first.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

HOWS = ("raise", "SIGKILL", "sys.exit(0)", "endless loop", "SIGSTOP")
PHASES = (
    "before init",
    "rehearsal",
    "forward",
    "between steps",
    "validation",
    "gated function",
    "saving",
    "loader worker",
)
#: Only rank 0 passes these.
OF_RANK_0 = ("gated function", "saving")


def reach(phase):
    """Fail here, if this is the phase and the rank."""
    how, wanted, rank = os.environ["TEST_FAULT"].split(":")
    if phase != wanted or os.environ["RANK"] != rank:
        return
    note_time(Path(os.environ["TEST_NOTES"], "fault"))
    if how == "raise":
        raise ValueError("a planted fault")
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sys.exit(0)":
        sys.exit(0)
    if how == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hold":  # until it is told to end; the other ranks wait for it meanwhile
        time.sleep(120)
    while how == "endless loop":
        pass


def note_time(note):
    """Note when the fault came first; whole or not at all, as the process may be killed meanwhile."""
    unfinished = note.with_name(f"{note.name}-{os.getpid()}")
    unfinished.write_text(str(time.time()))
    if note.exists():
        unfinished.unlink()
    else:
        unfinished.rename(note)


class Images(torch.utils.data.Dataset):
    """Pairs of noise, small enough to cost nothing."""

    def __init__(self, length):
        self.length = length
        self.from_rank = os.getpid()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if os.getpid() != self.from_rank and index >= self.length // 2:
            reach("loader worker")
        generator = torch.Generator().manual_seed(int(index))
        hr = torch.rand(3, 32, 32, generator=generator)
        return {"lr": hr[:, ::2, ::2].clone(), "hr": hr}


def images(split, scale, patch=None):
    """Return the data set of a split, in the place of the demo's photographs."""
    return Images(32 if split == "train" else 8)


def plant():
    """Put every phase's point into this process."""
    import srforge.distributed
    from srforge.distributed import main_process_only
    from srforge.training import Hook, Trainer, TrainingRunner, checkpoint_files, hooks_into, trainer

    class Steps(Hook):
        @hooks_into("on_pre_step")
        def before(self, context):
            if context.phase == "validation":
                reach("validation")

        @hooks_into("on_post_step")
        def after(self, context):
            if context.phase == "training" and context.global_step > 1:
                reach("between steps")

    class Epochs(Hook):
        @hooks_into("on_epoch_finished")
        @main_process_only
        def gated(self, context):
            reach("gated function")

    build = Trainer.__init__

    def build_with_hooks(self, *args, **kwargs):
        build(self, *args, **kwargs)
        for runner in (self.training_runner, self.validation_runner):
            runner.hooks.attach(Steps())
        self.hooks.attach(Epochs())

    Trainer.__init__ = build_with_hooks

    def forward_batch(self, network, batch):
        if self.global_step > 0:
            reach("forward")
        return network(batch["lr"])

    TrainingRunner.forward_batch = forward_batch
    srforge.distributed.setup_device = _after("before init", srforge.distributed.setup_device)
    trainer.rehearse_training = _after("rehearsal", trainer.rehearse_training)
    checkpoint_files.DigestingSink.write = _after("saving", checkpoint_files.DigestingSink.write)


def _after(phase, function):
    def reaching(*args, **kwargs):
        reach(phase)
        return function(*args, **kwargs)

    return reaching
