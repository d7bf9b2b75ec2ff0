"""The steps of zckpt.diff: pair tensors, plan what is read, compare values and trees."""
