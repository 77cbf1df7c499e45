"""Experiment tracking, once per fleet: local files, W&B, or nothing, behind one small interface."""

from srforge.tracking.errors import TrackingError
from srforge.tracking.local_tracker import LocalTracker
from srforge.tracking.null_tracker import NullTracker
from srforge.tracking.several_trackers import Trackers
from srforge.tracking.tracker import Tracker
from srforge.tracking.wandb_tracker import WandbTracker

__all__ = [
    "LocalTracker",
    "NullTracker",
    "Tracker",
    "Trackers",
    "TrackingError",
    "WandbTracker",
]
