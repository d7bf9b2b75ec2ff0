"""Where checkpoints live: the contract of a store, local directories, and the lock of a checkpoint."""
