"""``python -m specdraft.data.store data.store=DIR ...``: compute hidden states once, for many trainings."""

from specdraft.commands.store import main

if __name__ == "__main__":
    main()
