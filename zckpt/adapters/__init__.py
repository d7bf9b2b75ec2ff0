"""The adapters of the training engines: a folder for each framework, and what those of ``torch.nn.Module`` have in
common. The table ``zckpt.engines.FRAMEWORKS`` names their classes as text."""
