"""The steps of zckpt.convert: find out which format a folder is in, read the folder, and write the same state in the
other format."""
