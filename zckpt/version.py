"""The version of the library, and when this process imported it. The version of the format is in
``format/manifest.py``."""

from time import time

__version__ = "0.1.0"
IMPORTED_AT = time()
"""When this process imported zckpt, in seconds since the epoch."""
