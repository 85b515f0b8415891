"""Small causal LMs of others, and exported draft models and PARD drafts: directories that transformers reads."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file

from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.draft_start import attention, describe, has_other_tokens, take_weights
from specdraft.drafters.pard import Pard
from specdraft.drafters.tli import TliDraft
from specdraft.errors import UserError
from specdraft.export.draft_model import MASK
from specdraft.export.importing.files import Published
from specdraft.targets import LanguageModel, Target
from specdraft.targets.loading import load_model

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def read_draft_model(directory: Path, published: Published, target: Target) -> DraftModel:
    """The draft in ``directory``, of which ``published`` was read, weights in fp32, bound to ``target``: a ``Pard``
    where the configuration names a mask, a ``TliDraft`` where the directory holds another tokenizer than the target's.
    Raises UserError for what transformers does not read, and for a draft of another vocabulary without a tokenizer."""
    config, where = published.config, str(directory)
    has_tokenizer = any((directory / name).is_file() for name in _TOKENIZER)
    if MASK not in config and has_tokenizer and has_other_tokens(target, "checkpoint", where):
        return TliDraft.for_target(target, start="checkpoint", checkpoint=where).eval()
    size = config.get("vocab_size")
    if size != target.vocab_size:
        wrong = f"the draft model's vocab_size is {size} and the target's {target.vocab_size}"
        lacks = "" if has_tokenizer else ", and it has no tokenizer of its own"
        raise UserError(f"{wrong}{lacks}: expected a draft of this target; name its own target")
    with _plain(directory, published) as plain:
        source = LanguageModel(load_model(plain, None, "float32", attention(target), what="draft model"))
    source.check_logits()
    about = {key: value for key, value in describe(source.config).items() if key != MASK}
    kind, mask = (Pard, {"mask_token": config[MASK]}) if MASK in config else (DraftModel, {})
    draft = kind(model=about, attn_implementation=attention(target), **mask)
    take_weights(draft.language_model, source, range(source.num_layers))
    draft.bind(target)
    return draft.eval()


@contextmanager
def _plain(directory: Path, published: Published) -> Iterator[str]:
    """Inside, a directory with the weights that were read. transformers, which is the reader of these, would want a
    further package for quantized ones, and give what codes and scales stand for: that has scales of its own."""
    if published.quantization is None:
        yield str(directory)
        return
    with TemporaryDirectory(prefix=f"{directory.name}-") as folder:
        save_file(dict(published.tensors), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(published.config), encoding="utf-8")
        yield folder
