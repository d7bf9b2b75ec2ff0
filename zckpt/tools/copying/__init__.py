"""The steps of ``zckpt.cp`` that ``zckpt.checkpoint.copying`` does not have: the copy of some tensors."""
