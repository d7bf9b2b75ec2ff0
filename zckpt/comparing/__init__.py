"""The steps of zckpt.diff: pair the tensors, plan what is read, compare values and trees."""
