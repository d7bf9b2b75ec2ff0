"""Lists the directory of a run and the contents of each checkpoint. It reads no tensors and does not import torch."""
