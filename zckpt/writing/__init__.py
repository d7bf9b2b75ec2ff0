"""What a write consists of, for ``zckpt.write``."""
