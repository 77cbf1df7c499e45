"""srforge.training."""
