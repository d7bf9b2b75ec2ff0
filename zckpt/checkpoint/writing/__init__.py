"""The steps of ``zckpt.write``. ``options`` has the checked arguments. ``collect`` gathers the state of an engine, and
``plain`` replaces values that the format has no type for. ``prepare`` makes the ranks agree and plans their files, with
``joining`` if their tensors have different names, ``machines``, which finds out which ranks see the same directory, and
``reuse``, which finds files that have not changed. ``rank_write`` writes and commits. ``removal`` removes what writes
that died have left behind. ``saves`` counts the saves of an attached engine."""
