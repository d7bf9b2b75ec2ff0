"""What ``zckpt.open`` returns, and what lies in the directory of a run."""
