"""Training with PyTorch alone: one process, DistributedDataParallel, and FSDP2."""
