"""Independent drafts that tests train and decode with."""

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specdraft.drafters.draft_model import DraftModel
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.fakes import random_prompts
from tests.families import V

# Norms and rotary angles are computed in fp32 even in an fp64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LORA = {"r": 3, "alpha": 6, "target_modules": ["q_proj", "down_proj"]}
PROMPT = random_prompts(1, [9], V, seed=4)[0]


def noisy(draft: DraftModel, seed: int = 0) -> DraftModel:
    """In fp64, and unlike the target everywhere."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.double().parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g, dtype=torch.float64))
    return draft


def draft_for(target: Target, **options) -> DraftModel:
    return noisy(DraftModel.for_target(target, **options))


def whole(tokens: list[int]) -> Batch:
    """One document, all of it to be learned."""
    ids = torch.tensor([tokens])
    return Batch(ids, torch.arange(len(tokens))[None], torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))


def features_of(target: Target, batch: Batch):
    return target.features(batch.input_ids, batch.position_ids)


def tokenizer_of(size: int, first: str = "t") -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"{first}{i}": i for i in range(size)}, unk_token=f"{first}0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token=f"{first}0")


def start_from(directory, target, **options) -> DraftModel:
    return DraftModel.for_target(target, start="checkpoint", checkpoint=directory, **options)


def logits_of(draft) -> torch.Tensor:
    batch = whole(random_prompts(1, [12])[0])
    model = draft.language_model
    return model.logits(model.features(batch.input_ids, batch.position_ids).last).detach()
