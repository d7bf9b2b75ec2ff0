"""What lies in the directory of a run, and what each checkpoint holds: without its tensors, and without torch."""
