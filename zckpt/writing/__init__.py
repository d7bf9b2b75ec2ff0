"""The steps of ``zckpt.write``: ``options`` are checked, ``collect`` gathers an engine's state, in ``prepare`` the
ranks agree and plan, ``rank_write`` writes and commits. ``leftovers`` are those of writes that died."""
