"""The steps of zckpt.export: name and convert tensors as others expect them, lay out files, write them in slices."""
