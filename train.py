"""Train a drafter, measure it, export it: ``python train.py model=eagle3 target=llama-8b``; ``--help`` says more."""

from specdraft.commands.train import main

if __name__ == "__main__":
    main()
