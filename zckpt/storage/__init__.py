"""Access to the place where checkpoints are stored: the contract of a store, local directories, and a checkpoint's
lock."""
