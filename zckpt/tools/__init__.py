"""What is done with checkpoints beside writing, restoring, reading and validating them. The core imports none of it."""
