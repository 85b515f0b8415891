"""What a target wrote itself, and ships, is fit to be trained on."""

from specdraft.data.prompts import load_prompts
from specdraft.data.sources.base import SPLITS
from specdraft.data.sources.conversations import Conversations
from specdraft.data.sources.decontamination import Benchmark


def test_what_the_target_wrote_does_not_hold_what_evaluations_ask() -> None:
    asked = [message["content"] for prompt in load_prompts("chat", 40) for message in prompt.opening]
    benchmark = Benchmark(asked)
    source = Conversations("embedded://smollm2-conversations")
    found = [each for split in SPLITS for each in source.conversations(split)]
    assert len(found) > 1000 and not any(map(benchmark.overlaps, found))
