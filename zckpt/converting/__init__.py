"""The steps of zckpt.convert: find out what a folder is, read it, and write the same state in the other format."""
