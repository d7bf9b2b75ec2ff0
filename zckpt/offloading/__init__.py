"""The steps of zckpt.offload and zckpt.reload: write and read storages, free their memory, guard what is out."""
