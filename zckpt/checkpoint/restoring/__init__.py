"""The steps of ``zckpt.restore``. ``matching`` finds the tensor of the checkpoint for each tensor of the engine,
``plan`` checks everything else, and ``mismatch`` words the messages about what does not fit. ``machines`` opens a
checkpoint that is spread over machines, and ``peers`` reads the files of other machines from their ranks."""
