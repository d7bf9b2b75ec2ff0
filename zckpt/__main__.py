import sys

from zckpt.cli import main

sys.exit(main())
