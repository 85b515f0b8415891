"""``python -m specdraft.data.regenerate``: let the target answer the training prompts beforehand."""

from specdraft.commands.regenerate import main

if __name__ == "__main__":
    main()
