"""The steps of zckpt.gc and zckpt.prune: find what to remove, and remove it under a lock."""
