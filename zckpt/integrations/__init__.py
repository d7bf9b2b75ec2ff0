"""zckpt inside other programs."""
