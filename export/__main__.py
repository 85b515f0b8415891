"""Write a trained drafter as a serving engine loads it: ``python export engine=vllm checkpoint=PATH``."""

from specdraft.commands.export import main

if __name__ == "__main__":
    main()
