"""An opened checkpoint, as ``zckpt.open`` returns it, and the loading of any part of it as tensors."""
