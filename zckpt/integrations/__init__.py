"""zckpt inside other programs, by its public names alone."""
