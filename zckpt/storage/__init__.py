"""Access to the place where checkpoints are stored: the contract of a store, the stores for local directories, object
stores and web servers, a cache on a local disk, and a checkpoint's lock."""
