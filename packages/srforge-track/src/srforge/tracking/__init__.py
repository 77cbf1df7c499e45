"""srforge.tracking."""
