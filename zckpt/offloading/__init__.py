"""The steps of ``zckpt.offload`` and ``zckpt.reload``: storages are written and read, their memory is freed, and the
methods of the engine that need them are guarded."""
