"""The steps of zckpt.convert: say what a folder is, read it, and write the same state as a checkpoint."""
