"""What a script finds when it is started, as JSON: show.py ... FILE"""

import json
import sys
from pathlib import Path

Path(sys.argv[-1]).write_text(json.dumps({"name": __name__, "argv": sys.argv, "path": sys.path[0]}))
if "--engine" in sys.argv:
    from models import make_engine

    make_engine()
    make_engine()
if "--fail" in sys.argv:
    sys.exit(3)
