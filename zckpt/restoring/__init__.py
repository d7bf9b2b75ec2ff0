"""The steps of ``zckpt.restore``: ``matching`` finds the checkpoint's tensor for each of the engine's, ``plan`` checks
all else, and ``mismatch`` says what does not fit."""
