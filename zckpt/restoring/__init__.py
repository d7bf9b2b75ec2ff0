"""What a restore consists of, for ``zckpt.restore``."""
