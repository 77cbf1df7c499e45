"""Super-resolution: models, losses, metrics, degradations and data sets."""

from srforge.sr.colour import rgb_to_luma, to_float, to_stored
from srforge.sr.datasets import DemoPhotographs, PairedImages, demo_photographs
from srforge.sr.degradations import BlindDegradation, DegradedImages
from srforge.sr.losses import charbonnier, l1
from srforge.sr.metrics import gradient_energy_ratio, psnr, psnr_y, ssim, ssim_y
from srforge.sr.models import EDSR, PatchDiscriminator, RRDBNet, UNetDiscriminator, VGGDiscriminator
from srforge.sr.panels import panel
from srforge.sr.perceptual import PerceptualLoss
from srforge.sr.resize import bicubic_downscale, bicubic_upscale, mod_crop, resize_bicubic
from srforge.sr.tiling import forward_in_tiles

__all__ = [
    "EDSR",
    "BlindDegradation",
    "DegradedImages",
    "DemoPhotographs",
    "PairedImages",
    "PatchDiscriminator",
    "PerceptualLoss",
    "RRDBNet",
    "UNetDiscriminator",
    "VGGDiscriminator",
    "bicubic_downscale",
    "bicubic_upscale",
    "charbonnier",
    "demo_photographs",
    "forward_in_tiles",
    "gradient_energy_ratio",
    "l1",
    "mod_crop",
    "panel",
    "psnr",
    "psnr_y",
    "resize_bicubic",
    "rgb_to_luma",
    "ssim",
    "ssim_y",
    "to_float",
    "to_stored",
]
