"""``apps/train.py`` with a fault planted in it; see ``failure_faults``."""

import os
import runpy
import sys
from pathlib import Path

APP = Path(__file__).parents[1] / "apps" / "train.py"

if __name__ == "__main__":
    import failure_faults

    Path(os.environ["TEST_NOTES"], f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    sys.path.insert(0, str(APP.parent))
    failure_faults.plant()
    runpy.run_path(str(APP), run_name="__main__")
