"""The steps of ``zckpt.gc``, of ``zckpt.prune`` and of ``keep_last`` in a write: ``older`` finds the checkpoints that
are kept no longer, ``work`` removes them, and leftovers, under their locks, and ``cleanup`` has the result."""
