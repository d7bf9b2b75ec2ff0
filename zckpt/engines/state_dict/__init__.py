"""State dicts: nested maps of tensors, DTensors and plain values, for those who have no engine."""
