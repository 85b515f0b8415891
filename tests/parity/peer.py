"""``make parity-speculators``: a head that speculators 0.9.0 trains is imported, decoded, trained on and exported.

Its own train command, with its defaults but for what a CPU and short texts need, trains a head on hidden states of the
embedded target, from the same cached answers that ``make parity`` trains on. Then, through the real commands:
``specdraft import`` takes its directory; the head decodes here with exactly the counts of vLLM, which loads that
directory itself; ``train.py init=`` trains on from it, and its acceptance does not fall; the export of that is served
with exactly our counts again. Exits with 1 if anything is otherwise.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from comparison import Run, decode, differences, rate_difference, table
from datasets import Dataset
from engine import MAX_NEW_TOKENS, REPOSITORY, Engine, add_arguments, held_out_prompts
from hydra import compose, initialize_config_dir
from safetensors.torch import save_file
from short import LEAST_ACCEPTANCE_LENGTH, TRAINING, command

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.checkpoint import find, load_drafter
from specdraft.entry import CONF, build
from specdraft.errors import UserError, exit_on_user_error
from specdraft.export import export
from specdraft.export.eagle3 import OPTIONS
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from specdraft.targets.loading import location

NAME = "embedded://tiny"
THEIRS, OURS = "trained by speculators", "trained on by us"
# Its defaults are 8,192 tokens in a step and 20 epochs, bf16, Muon (in bf16 too, which takes a CPU ten times as long as
# the rest of a step), kernels for GPUs, and processes that read ahead.
ON_A_CPU = {"total-seq-len": "512", "epochs": "6", "hidden-states-dtype": "float32", "optimizer": "adamw"}
ON_A_CPU |= {"draft-attn-impl": "sdpa", "loss-implementation": "eager", "num-workers": "0", "on-missing": "raise"}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer = REPOSITORY / ".venv-speculators/bin/python"
    parser.add_argument("--peer-python", type=Path, default=peer, help="a python with speculators")
    parser.add_argument("--steps", type=int, default=60, help="how many we train on")
    add_arguments(parser, "parity-speculators")
    return parser.parse_args()


def documents(target: Target) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and loss mask ``[n]`` of the answers that the short drafters of ``make parity`` are trained on."""
    with initialize_config_dir(str(CONF), version_base=None):
        data = build(compose("train", ["model=eagle3", *TRAINING]).data)
    data.prepare(target)
    for batch in data.train_dataloader():
        for ids, mask, numbers in zip(batch.input_ids, batch.loss_mask, batch.document_ids, strict=True):
            for number in range(int(numbers.max()) + 1):
                yield ids[numbers == number], mask[numbers == number]


def write_data(target: Target, directory: Path) -> None:
    """What speculators trains on: its dataset of tokenized conversations, and a file of hidden states for each."""
    states = directory / "hidden_states"
    states.mkdir(parents=True)
    rows = []
    # The last of them is the output of the last layer, before the final norm, which speculators applies itself.
    layers = (*target.default_layers(), target.num_layers)
    for number, (ids, mask) in enumerate(documents(target)):
        with torch.inference_mode():
            aux = target.features(ids[None], torch.arange(len(ids))[None], layers).aux  # [1, n, 4H]
        hidden = aux.view(len(ids), len(layers), target.hidden_size).clone()
        save_file({"hidden_states": hidden, "token_ids": ids.clone()}, states / f"hs_{number}.safetensors")
        rows.append({"input_ids": ids.tolist(), "loss_mask": mask.long().tolist(), "seq_len": len(ids)})
    Dataset.from_list(rows).with_format("torch").save_to_disk(str(directory))


def trained_by_peer(python: Path, target: Target, work: Path) -> Path:
    """The directory that speculators wrote last, as anybody would publish it."""
    data, checkpoints = work / "data", work / "checkpoints"
    if not checkpoints.exists():
        write_data(target, data)
        paths = {"verifier-name-or-path": location(NAME), "data-path": str(data), "save-path": str(checkpoints)}
        options = [f"--{name}={value}" for name, value in (paths | ON_A_CPU).items()]
        script = str(Path(__file__).parent / "speculators_side.py")
        started, log = time.perf_counter(), work / "speculators.log"
        command(["-P", script, "--speculator-type=eagle3", *options], log, "the training by speculators", python)
        print(f"speculators trained {time.perf_counter() - started:.0f} s, see {log}", flush=True)
    epochs = [path for path in checkpoints.iterdir() if path.name.isdecimal()]
    if not epochs:
        raise UserError(f"speculators left no checkpoint in {checkpoints}: expected one for every epoch")
    return max(epochs, key=lambda path: int(path.name))


def imported(directory: Path, work: Path) -> Path:
    """The checkpoint that ``specdraft import`` makes of it."""
    output = work / "imported"
    shutil.rmtree(output, ignore_errors=True)
    options = [str(directory), "--target", NAME, "--output", str(output)]
    command(["-m", "specdraft", "import", *options], work / "import.log", "the import")
    return find(output)


def trained_on(checkpoint: Path, steps: int, work: Path) -> Path:
    """The checkpoint of ``train.py init=``."""
    run, log = work / "trained-on", work / "trained-on.log"
    shutil.rmtree(run, ignore_errors=True)
    options = [f"init={checkpoint}", *TRAINING, f"trainer.max_steps={steps}", f"hydra.run.dir={run}"]
    command(["train.py", "model=eagle3", *options], log, "training on")
    return find(run)


@exit_on_user_error
def main() -> None:
    """Train with speculators, import, train on, decode on both sides, compare, and say so."""
    options = arguments()
    engine = Engine.of(options)
    if not options.peer_python.is_file():
        wrong = f"there is no {options.peer_python}"
        raise UserError(f"{wrong}: expected a python with speculators, which `make parity-speculators` installs")
    torch.set_num_threads(1)
    target = Target.load(NAME, dtype="float32", device="cpu")
    published = trained_by_peer(options.peer_python, target, engine.work)
    checkpoints = {THEIRS: imported(published, engine.work)}
    checkpoints[OURS] = trained_on(checkpoints[THEIRS], options.steps, engine.work)
    served = {THEIRS: published, OURS: export(checkpoints[OURS], VLLM(dtype="float32"), engine.work / "exported")}
    k = options.num_draft_tokens
    prompts = held_out_prompts(target, options.prompts, k)
    runs = [{"name": name, "flags": VLLM.flags("eagle3", str(path), k)} for name, path in served.items()]
    theirs = engine.answers(target, prompts, runs)
    drafters = {name: load_drafter(checkpoint)[0] for name, checkpoint in checkpoints.items()}
    ours = {name: decode(Decoder(target, drafter, k), prompts, MAX_NEW_TOKENS) for name, drafter in drafters.items()}
    print(f"{len(prompts)} held-out prompts x {MAX_NEW_TOKENS} tokens, K = {k}, greedy, float32")
    held = drafters[THEIRS].config()
    print("options of the head:", {name: held[name] for name in OPTIONS if held[name] != OPTIONS[name]})
    failed = False
    for name, run in ours.items():
        print(f"\n== {name} ==\n" + table(run, theirs["plain"], theirs[name]))
        found = differences(run, theirs["plain"], theirs[name], LEAST_ACCEPTANCE_LENGTH["eagle3"])
        print("\n".join(f"DIFFERENT: {line}" for line in found) if found else "equal: tokens and all counts")
        failed = failed or bool(found)
    sys.exit(1 if falls(ours[THEIRS], ours[OURS], options.steps) or failed else 0)


def falls(before: Run, after: Run, steps: int) -> bool:
    """Whether ``steps`` of training on made the acceptance length shorter, beyond chance."""
    gap, (low, high) = rate_difference(before, after)
    print(
        f"\n{steps} steps of train.py init=: acceptance length {before.acceptance_length:.3f} before, "
        f"{after.acceptance_length:.3f} after, difference {gap:+.3f} [{low:+.3f}, {high:+.3f}] (99.9 %)"
    )
    return high < 0


if __name__ == "__main__":
    main()
