"""Writes its module name, its arguments and its first import path to a file, as JSON: show.py ... FILE"""

import json
import sys
from pathlib import Path

Path(sys.argv[-1]).write_text(json.dumps({"name": __name__, "argv": sys.argv, "path": sys.path[0]}))
if "--engine" in sys.argv:
    from tests.support.models import make_engine

    engine = make_engine()
    make_engine()
    best = Path(f"{sys.argv[-1]}.run/best")
    best.mkdir(parents=True)
    (best / "mp_rank_00_model_states.pt").touch()  # so that it looks like a checkpoint of DeepSpeed
    engine.save_checkpoint(best.parent, "best")
if "--raise" in sys.argv:
    raise ValueError("the script's own")
if "--fail" in sys.argv:
    sys.exit(3)
