"""Write a trained drafter as a serving engine loads it: ``python export engine=vllm checkpoint=PATH``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before an installed package, as train.py

from specdraft.commands.export import main

if __name__ == "__main__":
    main()
