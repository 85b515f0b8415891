"""What the notebooks share: the repository's root, and its commands as in a shell."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A page shows results, not progress bars and advice to programmers.
os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
warnings.filterwarnings("ignore", message="IProgress not found")


def run(*command: str) -> str:
    """What a command prints, with paths from the repository's root; an error if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.replace(f"{ROOT}/", "")
