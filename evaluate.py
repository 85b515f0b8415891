"""Measure a trained drafter by really decoding with it: ``python evaluate.py checkpoint=PATH``; see ``--help``."""

from specdraft.commands.evaluate import main

if __name__ == "__main__":
    main()
