"""The steps of ``zckpt.restore``: open the checkpoint, match tensors, plan, and say what does not fit."""
