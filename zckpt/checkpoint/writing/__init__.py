"""The steps of ``zckpt.write``. ``options`` has the checked arguments. ``collect`` gathers the state of an engine, and
joins those of the ranks if their tensors have different names. ``plain`` replaces values that the format has no type
for. ``prepare`` is what each rank does before its first byte, and ``decide`` what rank 0 decides then for all of them.
``machines`` finds out which ranks see the same directory, and ``reuse`` which files have not changed. ``rank_write``
writes and commits. ``removal`` removes what writes that died have left behind. ``saves`` counts the saves of an
attached engine."""
