"""Encodes and decodes each file of the format, as bytes, and checks its rules (``rules``) and bounds (``limits``):
``manifest``, ``index``, ``data_file``, ``tree`` and ``digest`` have a kind of file each, and ``names`` the names of all
files."""
