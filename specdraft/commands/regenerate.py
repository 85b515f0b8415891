"""``specdraft regenerate target=... data=...``: let the target answer the training prompts beforehand.

``train.py`` with the same target and data then finds the answers in the cache."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "regenerate")
def main(config: DictConfig) -> None:
    """Target and data as in training; every split is answered, and written as conversations on request."""
    # Imported here so that --help answers at once.
    from specdraft.data.regeneration.dialogue import answered_messages
    from specdraft.data.tokenization.cache import Notes
    from specdraft.files import atomic_file
    from specdraft.text import counted

    if not config.data.regenerate:
        raise UserError("data.regenerate is false: expected true, as nothing would be answered")
    engine = build(config.generator)
    data = build(config.data).preparation
    data.sizes()  # refuses a split without conversations
    target = build(config.target)
    answered = {}
    with closing(engine):
        for split in ("train", "validation"):
            done = answered[split] = data.answers(target, split, engine, Notes())
            counts = done.counts
            print(
                f"{split}: {counted(counts.conversations, 'conversation')}, {counted(counts.turns, 'answer')} of "
                f"{counted(counts.tokens, 'token')}\n"
                f"  {counts.unfinished} end at an answer that was cut, {counts.dropped} later turns with it; "
                f"{counts.shortened} shortened, {counts.left_out} left out, {counts.refused} refused by the template, "
                f"{counts.rejected} end at a question that was not asked\n"
                f"  {done.manifest}"
            )

    def lines() -> Iterator[dict[str, Any]]:
        for split, done in answered.items():
            asked = data.without_benchmark(data.conversations(split), Notes())
            outcomes = data.answered(done.outcomes(), Notes())
            for conversation, outcome in zip(asked, outcomes, strict=True):
                if outcome.examples:
                    tools = {"tools": [dict(tool) for tool in conversation.tools]} if conversation.tools else {}
                    messages = answered_messages(conversation, outcome, target)
                    cut = {"cut": True} if outcome.unfinished else {}  # the last answer has no end
                    yield {"id": conversation.id, "split": split, "messages": messages} | tools | cut

    if config.output is not None:
        path = Path(config.output).expanduser()
        with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines())
        print(f"conversations: {path}")


if __name__ == "__main__":
    main()
