"""What the embedded target is trained on: source files, test suites, and documented functions as chats."""

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
            turns = (("user", function.prompt), ("assistant", function.body))
            messages = [{"role": role, "content": content} for role, content in turns]
            kinds["chat"].append(tokenizer.apply_chat_template(messages, return_dict=False))
    return kinds


def sequences(kinds: dict[str, list[list[int]]], weights: dict[str, float], rng: random.Random) -> list[list[int]]:
    """Sequences for training: each kind repeated by its weight (a fraction takes a sample), shuffled, joined."""
    chosen: list[list[int]] = []
    for kind, weight in weights.items():
        chosen += kinds[kind] * int(weight) + rng.sample(kinds[kind], round(len(kinds[kind]) * (weight % 1)))
    # Long files are cut before shuffling: otherwise one module fills several neighboring batches.
    pieces = [ids[start : start + LENGTH] for ids in chosen for start in range(0, len(ids), LENGTH)]
    rng.shuffle(pieces)
    stream = [token for piece in pieces for token in piece]
    return [stream[end - LENGTH : end] for end in range(LENGTH, len(stream) + 1, LENGTH)]
