"""The steps of zckpt.export: name and convert the tensors, lay out the files, write them in slices."""
