"""What ``zckpt.open`` returns: an opened checkpoint, and any part of it as tensors."""
