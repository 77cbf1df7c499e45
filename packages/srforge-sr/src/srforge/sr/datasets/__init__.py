"""Data sets of LR and HR image pairs."""

from srforge.sr.datasets.demo import DemoPhotographs, demo_photographs

__all__ = [
    "DemoPhotographs",
    "demo_photographs",
]
