"""``specdraft COMMAND [OPTION...]``: finds the command; nothing is imported before it is known."""

import runpy
import sys
from difflib import get_close_matches

from specdraft import __version__

# Command: (module of specdraft.commands, what it does)
COMMANDS = {
    "train": ("train", "train a drafter, measure it, export it"),
    "evaluate": ("evaluate", "measure a trained drafter by really decoding with it"),
    "chat": ("chat", "talk to a target, each token in the color of its draft"),
    "export": ("export", "write a trained drafter as a serving engine loads it"),
    "bench": ("bench", "measure a served drafter in its engine, with and without drafts in turns"),
    "forecast": ("forecast", "say what more data and training would bring, from short runs"),
    "doctor": ("doctor", "find why a served drafter is hardly ever accepted"),
    "check": ("check", "check that a drafter of your own holds what every drafter has to"),
    "regenerate": ("regenerate", "let the target answer the training prompts beforehand"),
    "store": ("store", "compute hidden states once, for many trainings"),
    "sharpen": ("sharpen", "scale a drafter's logits by what most sampled drafts are to be accepted with"),
    "import": ("import_head", "turn a public head into a checkpoint"),
    "dashboard": ("dashboard", "give a W&B project the view of the metrics of training"),
}

HELP = """specdraft: train draft models for speculative decoding.

  specdraft COMMAND [OPTION...]

{}

specdraft COMMAND --help says more. A checkout has train.py, evaluate.py and export as well."""


def main() -> None:
    """Run the command that the first word names, with the words after it."""
    command, *options = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help", "help"):
        print(HELP.format("\n".join(f"  {name:<12}{about}" for name, (_, about) in COMMANDS.items())))
        return
    if command == "--version":
        print(f"specdraft {__version__}")
        return
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
        print(f"error: unknown command {command!r}: {hint} specdraft --help lists them", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = options
    # As ``python -m`` runs it: whoever starts this program again, as Lightning does for the other ranks and
    # multiprocessing for workers, goes by the name of the main module, and so starts the command.
    runpy.run_module(f"specdraft.commands.{COMMANDS[command][0]}", run_name="__main__", alter_sys=True)
