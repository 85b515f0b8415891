"""What is fuzzed: a small, whole sample for every reader of what others wrote."""

import json
from pathlib import Path

import pyarrow
import torch
from pyarrow import parquet
from transformers import AutoConfig, LlamaConfig

from specdraft.data.prompts import load_prompts
from specdraft.data.sources.conversations import Conversations
from specdraft.data.store import Store
from specdraft.data.store.contents import INDEX
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import about_target, load_drafter, save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.redrafter import ReDrafter
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.model_card import model_card
from specdraft.export.recurrent_drafting import RecurrentDrafting
from specdraft.export.vllm import VLLM
from specdraft.export.writer import layout_for
from specdraft.targets import Target
from specdraft.text import fingerprint
from specdraft.training.planning.meta_target import MetaTarget, target_config
from tests.data.store.conftest import Making, packed
from tests.drafters.tli.drafts import translating
from tests.fakes import tiny_llama
from tests.fuzzing import Reader

VOCABULARY = torch.arange(0, 64, 4)
ANSWER = {"role": "assistant", "content": "é"}
PARTS = [{"type": "text", "text": "x"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"a": 1}]}
ROWS: tuple[dict, ...] = (
    {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}, ANSWER]},
    {"messages": [{"role": "user", "content": PARTS}, CALL], "tools": "[{}]"},
    {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}], "system": "s"},
    {"instruction": "do", "input": "this", "output": "done", "category": "c"},
    {"text": "a document"},
)
WORDS = ("hi", "x", "why", "do", "a document")  # of each row, what decides its split
PROMPTS = (
    {"prompt": "hi", "category": "c", "id": 3},
    {"turns": ["a", "b"], "question_id": "q"},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
)
EVALUATION = {
    "created": "2026-01-01",
    "settings": {"prompts": 2, "max_new_tokens": 8, "draft_tree": "chain", "dtype": "float32", "device": "cpu"},
    "results": [
        {
            "drafter": "eagle3",
            "temperature": 0.0,
            "acceptance_length": 2.0,
            "draft_acceptance_rate": 0.5,
            "speedup": None,
            "conditional_acceptance_rate": [0.5, None],
        }
    ],
}


def readers(folder: Path) -> list[Reader]:
    """All readers; their samples are written below ``folder``."""
    model = tiny_llama(num_hidden_layers=6)
    model.save_pretrained(folder / "whole")  # an export of an MTP layer takes the embedding from there
    target = Target.from_model(model, name=str(folder / "whole"))

    def path(name: str) -> Path:
        (folder / name).mkdir(parents=True)
        return folder / name

    def checkpoint(name: str, drafter: Drafter) -> Path:
        data = {"source": "s", "regenerated": True, "temperatures": [0.0]}
        extra = {"decoding": {"num_draft_tokens": 3}, "data": data, "target": about_target(target)}
        return save_drafter(drafter, folder / name, target.identity, extra)

    def read_lines(place: Path) -> None:
        for split in ("train", "validation", "test"):
            Conversations(str(place), max_malformed=3, held_out=0.3).conversations(split)

    found = [Reader("prompts", path("prompts"), lambda place: load_prompts(str(place / "p.jsonl")))]
    _lines(folder / "prompts" / "p.jsonl", PROMPTS)
    for index, (row, words) in enumerate(zip(ROWS, WORDS, strict=True)):
        name = f"conversations-{index}"
        _lines(path(name) / "rows.jsonl", [row, *(_other_words(row, words, n) for n in range(12))])
        found.append(Reader(name, folder / name, read_lines))
    array = [{"prompt": f"what {n}", "response": "that"} for n in range(12)]
    (path("array") / "rows.json").write_text(json.dumps(array))
    found.append(Reader("array", folder / "array", read_lines))
    parquet.write_table(pyarrow.Table.from_pylist(array), path("parquet") / "rows.parquet")
    found.append(Reader("parquet", folder / "parquet", read_lines))

    heads = {
        "medusa": Medusa.for_target(target, None, num_heads=2),
        "hydra": Hydra.for_target(target, VOCABULARY, num_heads=2, num_layers=2),
        "eagle": Eagle.for_target(target),
        "eagle3": Eagle3.for_target(target, VOCABULARY, fc_norm=True),
        "draft": DraftModel.for_target(target, copy_layers=2),
        "tli": translating(target),
    }
    heads["tli"].files = {"tokenizer.json": b"{}"}
    for name, head in heads.items():
        found.append(Reader(f"drafter-{name}", checkpoint(f"drafter-{name}", head), lambda place: load_drafter(place)))

    def read_for_export(place: Path) -> None:
        drafter, trained = load_drafter(place)
        layout = layout_for(drafter, trained.get("extra", {}).get("target", {}), VLLM("auto"), place / "export")
        model_card(trained, layout, VLLM("auto"), place / "export", place / "evaluation.json")

    exported = checkpoint("export", Medusa.for_target(target, None, num_heads=1))
    (exported / "evaluation.json").write_text(json.dumps(EVALUATION))
    found.append(Reader("export", exported, read_for_export))
    public = export(checkpoint("to-publish", heads["eagle3"]), VLLM("auto"), folder / "public")
    (public / "README.md").unlink()
    found.append(Reader("import", public, lambda place: import_head(place, target)))
    drafters = {name: heads[name] for name in ("medusa", "eagle", "draft")} | {"mtp": MTP.for_target(target)}
    for name, drafter in drafters.items():
        public = export(checkpoint(f"{name}-to-publish", drafter), VLLM("auto"), folder / f"public-{name}")
        (public / "README.md").unlink()
        found.append(Reader(f"import-{name}", public, lambda place: import_head(place, target)))
    quantized = {"int8": heads["draft"], "int4": Eagle3.for_target(target, VOCABULARY, intermediate_size=64)}
    for scheme, drafter in quantized.items():
        trained = checkpoint(f"{scheme}-to-publish", drafter)
        public = export(trained, VLLM("auto"), folder / f"public-{scheme}", quantization=scheme)
        (public / "README.md").unlink()
        found.append(Reader(f"import-{scheme}", public, lambda place: import_head(place, target)))
    recurrent = checkpoint("recurrent", ReDrafter.for_target(target, exit_size=40))
    public = export(recurrent, RecurrentDrafting("auto"), folder / "public-recurrent")
    (public / "README.md").unlink()
    found.append(Reader("import-redrafter", public, lambda place: import_head(place, target)))

    def read_target(place: Path) -> None:
        MetaTarget(target_config({"name": str(place)}), "fuzzed")

    for kind in ("llama", "qwen3_moe"):
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = AutoConfig.for_model(kind, **sizes, num_attention_heads=4, num_key_value_heads=2)
        config.save_pretrained(path(f"target-{kind}"))
        found.append(Reader(f"target-{kind}", folder / f"target-{kind}", read_target))
    LlamaConfig(num_hidden_layers=1).save_pretrained(path("index"))
    names = {f"layer.{n}": "model-00001-of-00001.safetensors" for n in range(3)}
    (folder / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found.append(Reader("index", folder / "index", lambda place: target_config({"name": str(place)})))

    for dtype in ("float32", "float8"):
        found.append(_store(folder / f"store-{dtype}", dtype))
    return found


def _store(place: Path, dtype: str) -> Reader:
    making = Making(Target.from_model(tiny_llama(num_hidden_layers=4)), place)
    making.batches = {"train": packed(3, seed=1), "validation": packed(1, seed=2)}
    making.store(dtype=dtype)

    def read(folder: Path) -> None:
        store = Store(folder)
        for split, rows in store.data.items():
            store.read(split, range(len(rows))).decode(torch.float32)

    return Reader(f"store-{dtype}", place, read, _mend_store)


def _mend_store(folder: Path, name: str) -> None:
    """Make the checksum of a file and the fingerprint of the index right, as a forger would."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if name != INDEX:
            data = (folder / name).read_bytes()
            new = f"{name.rpartition('-')[0]}-{fingerprint(data)}{Path(name).suffix}"
            (folder / name).rename(folder / new)
            index = json.loads(json.dumps(index).replace(name, new))
        fields = index["contents"]
        index["fingerprint"] = fingerprint(fields)
        (folder / INDEX).write_text(json.dumps(index))
    except (ValueError, KeyError, TypeError):
        return


def _lines(path: Path, rows: object) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def _other_words(row: dict, words: str, number: int) -> dict:
    """The row with other words, so that every split has rows."""
    return json.loads(json.dumps(row).replace(f'"{words}"', f'"{words} {number}"'))
