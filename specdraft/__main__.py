"""``python -m specdraft COMMAND``: the same as ``specdraft COMMAND``, without installation."""

from specdraft.cli import main

if __name__ == "__main__":
    main()
