"""The version of the library. The version of the format is in ``format/manifest.py``."""

__version__ = "0.2.0"
