"""The steps of zckpt.diff: pair the tensors, plan the reads, compare values and trees."""
