"""The steps of zckpt.offload and zckpt.reload: scratch files, storages without memory, guards, what is out."""
