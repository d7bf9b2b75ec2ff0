"""The steps of zckpt.gc and zckpt.prune: what goes, under which lock, in which order."""
