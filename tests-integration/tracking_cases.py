"""What each rank does in the tests of trackers."""

from pathlib import Path

from harness import asked_backend, asked_device


def rank_tracks(folder, own_file_system):
    """Log an epoch to every kind of tracker, twice, as a run and its resume; return what each launch answered."""
    import os

    import torch

    from srforge.distributed import get_active_strategy, setup_device
    from srforge.tracking import LocalTracker, NullTracker, Trackers, WandbTracker

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    setup_device(torch.nn.Linear(1, 1), asked_device(), options={"backend": asked_backend()})
    rank = get_active_strategy().rank
    run = Path(folder, f"node-{rank}" if own_file_system else "node-0", "run")
    answers = []
    for epoch in (0, 1):
        wandb_tracker = WandbTracker("project", run)
        tracker = Trackers(LocalTracker(run), wandb_tracker, NullTracker())
        tracker.rewind(epoch)
        tracker.log_image("panel", torch.zeros(3, 4, 4), epoch=epoch)
        tracker.log_metrics({"training": {"loss": 1.0}, "validation": {"psnr": 30.0 + rank}}, epoch=epoch)
        tracker.finish()
        answers.append((tracker.run_id, tracker.is_resumed, wandb_tracker.run_id, wandb_tracker.is_resumed))
    return answers
