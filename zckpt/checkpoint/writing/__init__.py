"""The steps of ``zckpt.write``. ``options`` has the checked arguments, ``collect`` gathers the state of an engine,
``prepare`` makes the ranks agree and plans their files, ``machines`` finds out which ranks see the same directory, and
``rank_write`` writes and commits. ``removal`` removes what writes that died have left behind."""
