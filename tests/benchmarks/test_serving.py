"""What is concluded from the blocks that a server answered."""

import json
from pathlib import Path

import pytest

import serving
from serving import NGRAM, PLAIN, Block, chosen, summary


def block(contender: str, category: str, seconds: float, rounds: float = 0, accepted: float = 0) -> Block:
    return Block(contender, 1, category, 0, seconds, 60, rounds, accepted)


def test_a_speedup_is_the_ratio_of_the_tokens_a_second_of_all_blocks():
    blocks = [block(PLAIN, "a", 4.0), block(PLAIN, "b", 2.0), block(NGRAM, "a", 2.0, 30, 30)]
    blocks += [block(NGRAM, "b", 1.0, 50, 10), Block(NGRAM, 4, "b", 0, 9.0, 60)]
    found = summary(blocks, NGRAM, 1)
    assert found["tokens_per_second"] == pytest.approx(120 / 3) and found["speedup"] == pytest.approx(2.0)
    assert found["acceptance_length"] == pytest.approx(1 + 40 / 80)
    assert found["speedup_interval"] == pytest.approx((2.0, 2.0))
    assert summary(blocks, PLAIN, 1)["acceptance_length"] is None


def test_so_many_prompts_of_each_category(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"What is {n}?", "category": "ab"[n % 2], "id": n} for n in range(6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [prompt.id for prompt in chosen(str(file), 2)] == ["0", "1", "2", "3"]
    assert len(chosen(str(file), None)) == 6


class FakeServers:
    """Servers that answer at once: the drafting one as plain does, but for a prompt."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.drafted = {"plain": 0, "ngram": 0}

    def server(self, url: str, concurrency: int, timeout: float) -> "FakeServers.Server":
        return FakeServers.Server(self, url)

    class Server:
        def __init__(self, servers: "FakeServers", url: str) -> None:
            self.servers, self.url = servers, url

        def answers(self, target, requests, settings):
            self.servers.asked.append((self.url, len(requests)))
            if self.url == "ngram":
                self.servers.drafted["ngram"] += 3 * len(requests)
            for number, request in enumerate(requests):
                odd = self.url == "ngram" and request.prompt == [2]
                yield number, [*request.prompt, 7, 8 if odd else 9]

        def close(self) -> None: ...


def test_contenders_take_turns_and_follow_ups_continue_the_plain_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FakeServers()
    monkeypatch.setattr(serving, "Server", servers.server)
    monkeypatch.setattr(
        serving, "counts", lambda url: {"rounds": servers.drafted[url], "drafted": 0, "accepted": servers.drafted[url]}
    )
    monkeypatch.setattr(serving, "encode", lambda tokenizer, messages: [int(messages[-1]["content"])])
    monkeypatch.setattr(serving, "answer_in_words", lambda tokenizer, ids: " ".join(map(str, ids)))
    prompts = [
        serving.Prompt("0", "a", ({"role": "user", "content": "1"},), ("5",)),
        serving.Prompt("1", "a", ({"role": "user", "content": "2"},)),
        serving.Prompt("2", "b", ({"role": "user", "content": "3"},)),
    ]

    class Bar:
        def update(self) -> None: ...

    class FakeTarget:
        tokenizer = None

    bench = serving.Bench(FakeTarget(), {"plain": "plain", "ngram": "ngram"}, 3)
    blocks = list(bench.run(prompts, 1, Bar()))
    assert servers.asked == [("plain", 2), ("ngram", 2), ("ngram", 1), ("plain", 1), ("ngram", 1), ("plain", 1)]
    found = {(each.contender, each.category, each.turn): each for each in blocks}
    assert len(found) == 6
    assert found["ngram", "a", 0].different == 1 and found["ngram", "a", 1].different == 0
    assert found["ngram", "a", 0].rounds == 6 and found["plain", "a", 0].rounds == 0
    assert found["ngram", "a", 1].answers == [[5, 7, 9]]
