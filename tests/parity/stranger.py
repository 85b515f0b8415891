"""A draft model with another tokenizer: two layers of the embedded target, and a vocabulary learned from these docs."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.tli.tokens import shared_tokens
from specdraft.files import atomic_directory
from specdraft.targets import Target
from specdraft.targets.loading import location

DOCS = Path(__file__).parents[2] / "docs"
SIZE = 3000


def stranger(directory: Path) -> Path:
    """Write it to ``directory``, once. What both tokenizers have keeps the target's embedding."""
    if directory.exists():
        return directory
    target = Target.load("embedded://tiny", None, dtype="float32", device="cpu", packed=False)
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    model = DraftModel.for_target(target, copy_layers=2).export_model()
    theirs = model.get_input_embeddings().weight.detach()
    model.resize_token_embeddings(len(tokenizer))
    tokens = shared_tokens(AutoTokenizer.from_pretrained(location("embedded://tiny")), tokenizer, len(theirs), SIZE)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight.normal_(std=float(theirs.std()))
        rows[tokens.draft] = theirs[tokens.target]
    with atomic_directory(directory) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=SIZE, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    words.train([str(page) for page in sorted(DOCS.glob("**/*.md"))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
