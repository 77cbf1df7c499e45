"""Data sets of LR and HR image pairs."""

from srforge.sr.datasets.demo import DemoPhotographs, demo_photographs
from srforge.sr.datasets.paired import PairedImages

__all__ = [
    "DemoPhotographs",
    "PairedImages",
    "demo_photographs",
]
