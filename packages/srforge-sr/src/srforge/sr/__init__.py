"""srforge.sr."""
