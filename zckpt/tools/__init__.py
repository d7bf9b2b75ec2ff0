"""What is done with checkpoints beside writing, restoring and reading them. The core imports none of it."""
