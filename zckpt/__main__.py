"""Runs the command line, as ``python -m zckpt``."""

import sys

from zckpt.cli import main

sys.exit(main())
