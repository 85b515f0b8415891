"""What the embedded target reads: source files, test suites, and chat examples of documented functions."""

import random

from transformers import PreTrainedTokenizerFast

from specdraft.data.sources import stdlib

LENGTH = 512  # tokens of a training sequence


def documents(tokenizer: PreTrainedTokenizerFast, split: str) -> dict[str, list[list[int]]]:
    """Token ids of the split's documents by kind: ``library`` files, ``tests`` files and ``chat`` examples."""
    kinds: dict[str, list[list[int]]] = {"library": [], "tests": [], "chat": []}
    for path in stdlib.files():
        if stdlib.split_of(path) != split:
            continue
        source = stdlib.read(path)
        ids = tokenizer(source, add_special_tokens=False)["input_ids"]
        kinds["tests" if stdlib.is_test(path) else "library"].append([tokenizer.bos_token_id, *ids])
        for function in stdlib.functions(source, path):
            messages = [
                {"role": "user", "content": function.prompt},
                {"role": "assistant", "content": function.body},
            ]
            chat = tokenizer.apply_chat_template(messages, tokenize=False)
            kinds["chat"].append(tokenizer(chat, add_special_tokens=False)["input_ids"])
    return kinds


def sequences(kinds: dict[str, list[list[int]]], weights: dict[str, float], rng: random.Random) -> list[list[int]]:
    """Sequences of ``LENGTH`` tokens: each kind repeated by its weight (a fraction is a sample), shuffled, joined."""
    chosen: list[list[int]] = []
    for kind, weight in weights.items():
        whole = int(weight)
        chosen += kinds[kind] * whole
        chosen += rng.sample(kinds[kind], round(len(kinds[kind]) * (weight - whole)))
    # Long files are cut into pieces before shuffling: else one module fills several neighboring batches.
    pieces = [ids[start : start + LENGTH] for ids in chosen for start in range(0, len(ids), LENGTH)]
    rng.shuffle(pieces)
    stream = [token for piece in pieces for token in piece]
    return [stream[start : start + LENGTH] for start in range(0, len(stream) - LENGTH + 1, LENGTH)]
