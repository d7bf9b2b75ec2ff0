"""What a repair consists of, for ``zckpt.repair``."""
