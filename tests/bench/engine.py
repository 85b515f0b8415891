"""A fake engine: ``python engine.py ... --port N --served-model-name NAME``. It streams as vLLM does, counts its
drafts, and does what goes wrong in the field where its words say so."""

import json
import os
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class World(ThreadingHTTPServer):
    """per_round: tokens of a piece, one more than it drafts. trouble(prompt, n): what goes wrong when a prompt is asked
    for the n-th time: "stall", "hang up", "500", "400", "die", or a wrong "token"."""

    daemon_threads = True
    request_queue_size = 64  # connections that wait; beyond them the kernel drops some for a second

    def __init__(self, port: int = 0, model: str = "tiny", per_round: int = 1, length: int = 6, pause: float = 0.0):
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.per_round, self.length, self.pause = model, per_round, length, pause
        self.trouble = lambda prompt, n: None
        self.asked: list[dict[str, Any]] = []
        self.times: Counter[str] = Counter()
        self.at_once = self.most_at_once = self.rounds = 0
        self.lock, self.ended = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: World

    def do_GET(self) -> None:
        world = self.server
        if self.path == "/v1/models":
            return self.reply(200, json.dumps({"data": [{"id": world.model}]}))
        if self.path != "/metrics":
            return self.reply(404, "")
        drafted = world.per_round - 1
        lines = [f'vllm:cache_config_info{{block_size="16",kv_cache_size_tokens="{1600 - 100 * drafted}"}} 1.0']
        if drafted:
            lines += [
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(world.rounds)}',
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {float(world.rounds * drafted)}',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(world.rounds * drafted)}',
            ]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{engine="0",position="{i}"}} {float(world.rounds)}' for i in range(drafted)]
        return self.reply(200, "\n".join(lines))

    def do_POST(self) -> None:
        world = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        with world.lock:
            world.asked.append(body)
            world.at_once += 1
            world.most_at_once = max(world.most_at_once, world.at_once)
            world.times[prompt] += 1
            trouble = world.trouble(prompt, world.times[prompt])
        try:
            self.answer(body, prompt, trouble)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with world.lock:
                world.at_once -= 1

    def answer(self, body: dict[str, Any], prompt: str, trouble: str | None) -> None:
        world = self.server
        if trouble == "die":
            os._exit(3)
        if trouble and trouble.isdigit():
            return self.reply(int(trouble), json.dumps({"error": "too long"}))
        ids = [(len(prompt) + i) % 50 for i in range(min(world.length, body["max_tokens"]))]
        if trouble == "token":
            ids[-1] = 77
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        pieces = [ids[:1], *[ids[i : i + world.per_round] for i in range(1, len(ids), world.per_round)]]
        for number, piece in enumerate(pieces):
            if number and trouble == "hang up":
                return None
            if number and trouble == "stall":
                world.ended.wait(20)
                return None
            time.sleep(world.pause)
            with world.lock:
                world.rounds += number > 0
            end = "length" if number == len(pieces) - 1 else None
            words = "".join(f" {token}" for token in piece)
            self.event(
                {"choices": [{"index": 0, "delta": {"content": words}, "token_ids": piece, "finish_reason": end}]}
            )
        self.event({"choices": [], "usage": {"completion_tokens": len(ids)}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def reply(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def main() -> None:
    """Serve until ended; "--die" does not start, "--deaf" is never ready, "--mortal" dies of a prompt "die"."""
    words = sys.argv[1:]
    if "--die" in words:
        sys.exit("no memory for the cache")
    if "--deaf" in words:
        time.sleep(60)
    config = json.loads(words[words.index("--speculative-config") + 1]) if "--speculative-config" in words else {}
    port, model = (words[words.index(name) + 1] for name in ("--port", "--served-model-name"))
    world = World(int(port), model, 1 + config.get("num_speculative_tokens", 0))
    world.trouble = lambda prompt, n: "die" if "--mortal" in words and prompt == "die" and n > 3 else None
    world.serve_forever()


if __name__ == "__main__":
    main()
