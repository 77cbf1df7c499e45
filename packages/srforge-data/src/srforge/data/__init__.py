"""srforge.data."""
