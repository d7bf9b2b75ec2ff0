"""The steps of zckpt.gc and zckpt.prune: what is removed, under which lock, and in which order."""
