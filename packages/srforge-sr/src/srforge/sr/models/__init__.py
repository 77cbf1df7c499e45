"""Generators and discriminators for super-resolution."""

from srforge.sr.models.discriminators import PatchDiscriminator, UNetDiscriminator, VGGDiscriminator
from srforge.sr.models.edsr import EDSR
from srforge.sr.models.rrdbnet import RRDBNet

__all__ = [
    "EDSR",
    "PatchDiscriminator",
    "RRDBNet",
    "UNetDiscriminator",
    "VGGDiscriminator",
]
