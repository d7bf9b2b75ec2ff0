"""Checkpoints in several places: uploads, the choice of what is restored, and reads from the nearest place."""
