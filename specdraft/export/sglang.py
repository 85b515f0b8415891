"""SGLang: the same plain layout as vLLM's, read from ``eagle_config``. Written to its format, not yet run in it."""

from specdraft.export.engine import Engine


class SGLang(Engine):
    """SGLang's ``EAGLE3`` algorithm, as a chain."""

    name = "sglang"

    def usage(self, target: str, directory: str, num_draft_tokens: int, dtype: str) -> str:
        """The server's command line."""
        return (
            f"```bash\npython -m sglang.launch_server --model-path {target} --dtype {dtype} "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {directory} "
            f"--speculative-num-steps {num_draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {num_draft_tokens + 1}\n```\n\n"
            "The files follow the format that SGLang 0.5.23 reads. specdraft's own parity test runs vLLM only; "
            "compare the server's acceptance with the table before relying on it.\n"
        )
