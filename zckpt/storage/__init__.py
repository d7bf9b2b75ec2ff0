"""Access to the place where checkpoints are stored: the contract of a store, the store for local directories, a
cache on a local disk, and a checkpoint's lock."""
