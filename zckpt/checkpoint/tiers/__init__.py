"""Checkpoints in several places: uploads of what was written nearby, the choice of what is restored, and reads of each
file from the nearest place that has it."""
