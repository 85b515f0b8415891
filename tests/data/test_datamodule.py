from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from specdraft.data.datamodule import DataModule
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.data.tokenization.chat import example_from_words, prompt_ids
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch


def make(library: Path, cache: Path, **options: Any) -> DataModule:
    defaults: dict[str, Any] = {
        "sequence_length": 128,
        "batch_size": 2,
        "limit": 40,
        "validation_limit": 7,
        "max_new_tokens": 8,
        "generation_batch_size": 16,
        "cache_dir": str(cache),
    }
    return DataModule(PythonStdlib(root=str(library)), **defaults | options)


def documents(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    found = []
    for row in range(len(batch.input_ids)):
        for document in range(int(batch.document_ids[row].max()) + 1):
            inside = batch.document_ids[row] == document
            found.append((batch.input_ids[row, inside].tolist(), batch.loss_mask[row, inside].tolist()))
    return found


def test_regenerated_documents_are_prompts_and_the_targets_own_answers(
    target: Target, library: Path, tmp_path: Path
) -> None:
    data = make(library, tmp_path)
    data.prepare(target)
    conversations = data.preparation.source.conversations("validation", 7)
    prompts = [tuple(prompt_ids(target.tokenizer, c.prompt_messages)) for c in conversations]
    batches = list(data.val_dataloader())
    found = [document for batch in batches for document in documents(batch)]
    assert len(found) == 7
    for ids, mask in found:
        assert tuple(ids[: mask.index(True)]) in prompts
        assert 1 <= sum(mask) <= 8
        assert all(mask[mask.index(True) :])
    assert {batch.input_ids.shape for batch in batches} == {(2, 128)}


def test_source_responses_can_be_kept(target: Target, library: Path, tmp_path: Path) -> None:
    data = make(library, tmp_path, regenerate=False)
    data.prepare(target)
    expected = [
        tuple(map(tuple, example_from_words(target.tokenizer, c, target.eos_token_ids)))
        for c in data.preparation.source.conversations("validation", 7)
    ]
    found = [(tuple(ids), tuple(mask)) for batch in data.val_dataloader() for ids, mask in documents(batch)]
    assert sorted(found) == sorted(expected)
    assert not tmp_path.joinpath("responses").exists()


def test_counts_vocabulary_and_description(target: Target, library: Path, tmp_path: Path) -> None:
    data = make(library, tmp_path, batch_size=1)
    data.prepare(target)
    supervised = torch.cat([batch.input_ids[batch.loss_mask] for batch in data.train_dataloader()])
    assert torch.equal(data.response_counts, torch.bincount(supervised, minlength=target.vocab_size))
    vocabulary = data.draft_vocabulary(50)
    assert len(vocabulary) == 50
    assert target.tokenizer.eos_token_id in vocabulary
    assert len(data.draft_vocabulary(None)) == target.vocab_size
    assert 0 < data.coverage(vocabulary)["validation_coverage"] < data.coverage(vocabulary)["train_coverage"] <= 1
    about = data.describe()
    assert about["train_documents"] == 40
    assert about["train_supervised_tokens"] == len(supervised)
    assert about["train_left_out"] == 0
    assert 0 <= about["train_padding_share"] < 0.5


def test_prompts_without_room_are_left_out_and_counted(target: Target, library: Path, tmp_path: Path) -> None:
    source = PythonStdlib(root=str(library))
    lengths = sorted(len(prompt_ids(target.tokenizer, c.prompt_messages)) for c in source.conversations("train", 40))
    middle = lengths[20]
    data = make(library, tmp_path, sequence_length=middle + 8)
    data.prepare(target)
    about = data.describe()
    assert about["train_left_out"] == sum(length > middle for length in lengths) > 0
    assert about["train_documents"] + about["train_left_out"] == 40
    assert about["train_split"] == 0
    with pytest.raises(UserError, match="none of the 40 train conversations fits"):
        make(library, tmp_path, sequence_length=10).prepare(target)


def test_what_the_benchmark_asks_is_left_out_and_counted(target: Target, library: Path, tmp_path: Path) -> None:
    source = PythonStdlib(root=str(library))
    asked = [source.conversations(split, 7)[3].prompt_messages[0]["content"] for split in ("train", "validation")]
    data = make(library, tmp_path, limit=7, benchmark=[asked[0].upper(), asked[1]])
    with (
        pytest.warns(UserWarning, match="1 of 7 train conversations hold what the benchmark asks"),
        pytest.warns(UserWarning, match="1 of 7 validation conversations hold what the benchmark asks"),
    ):
        data.prepare(target)
    about = data.describe()
    assert (about["train_overlapping"], about["validation_overlapping"]) == (1, 1)
    assert (about["train_documents"], about["validation_documents"]) == (6, 6)


def test_evaluation_prompts_fit_the_context(target: Target, library: Path, tmp_path: Path) -> None:
    data = make(library, tmp_path)
    data.prepare(target)
    prompts = data.evaluation_prompts("validation", 5, max_new_tokens=32)
    assert len(prompts) == 5
    first = data.preparation.source.conversations("validation")[0]
    assert prompts[0] == (first.category, prompt_ids(target.tokenizer, first.prompt_messages))
    room = max(len(ids) for _, ids in prompts)
    short = data.evaluation_prompts("validation", None, max_new_tokens=256 - room + 1)
    assert max(len(ids) for _, ids in short) < room
    with pytest.raises(UserError, match="no validation prompt"):
        data.evaluation_prompts("validation", 5, max_new_tokens=255)


def test_evaluation_prompts_are_those_that_the_template_takes(
    target: Target, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(library, tmp_path)
    data.prepare(target)
    every = data.evaluation_prompts("validation", 5, max_new_tokens=32)
    first = data.preparation.source.conversations("validation")[0].prompt_messages[-1]["content"]
    template = target.tokenizer.chat_template
    refusing = "{% if messages[-1].content == " + repr(first) + " %}{{ raise_exception('not this') }}{% endif %}"
    monkeypatch.setattr(target.tokenizer, "chat_template", refusing + template)
    assert data.evaluation_prompts("validation", 4, max_new_tokens=32) == every[1:]
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ raise_exception('none') }}")
    with pytest.raises(UserError, match="chat template cannot render"):
        data.evaluation_prompts("validation", 4, max_new_tokens=32)


class Recorder(LightningModule):
    """Learns nothing; notes the batches it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen.append(batch.input_ids.flatten().tolist())
        return self.weight.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(data: DataModule, max_steps: int, folder: Path, callbacks: list[Callback], **fit: Any) -> list[list[int]]:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        max_epochs=-1,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    recorder = Recorder()
    trainer.fit(recorder, datamodule=data, **fit)
    return recorder.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_run_sees_the_very_same_batches(
    target: Target, library: Path, tmp_path: Path, num_workers: int
) -> None:
    def data() -> DataModule:
        module = make(library, tmp_path, num_workers=num_workers, seed=4)
        module.prepare(target)
        return module

    per_epoch = len(data().train_dataloader())
    assert per_epoch >= 4
    steps = 3 * per_epoch + 1
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(data(), steps, tmp_path, [saver])
    assert len(whole) == steps
    assert sorted(whole[:per_epoch]) != sorted(whole[per_epoch : 2 * per_epoch])  # batches are dealt anew
    # Within the first and a later epoch, and on the border between two.
    places = [1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch, 2 * per_epoch + 2]
    for step in places if num_workers == 0 else [2 * per_epoch + 2]:
        saved = tmp_path / "saved" / f"step={step}.ckpt"
        assert run(data(), steps, tmp_path, [], ckpt_path=saved) == whole[step:], step


def test_an_epoch_without_a_validation_is_refused(target: Target, library: Path, tmp_path: Path) -> None:
    data = make(library, tmp_path)
    data.prepare(target)
    options = {"accumulate_grad_batches": 1, "global_rank": 0, "world_size": 1, "max_steps": -1, "global_step": 0}
    data.trainer = SimpleNamespace(**options, check_val_every_n_epoch=1, val_check_interval=250)  # type: ignore
    with pytest.raises(UserError, match="val_check_interval is 250, and an epoch has"):
        data.train_dataloader()


def test_a_run_that_ends_within_a_step_resumes_before_it(target: Target, library: Path, tmp_path: Path) -> None:
    data = make(library, tmp_path, batch_size=1)
    data.prepare(target)
    data.train_dataloader()
    loop = SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(processed=5)))
    counts = {"accumulate_grad_batches": 2, "current_epoch": 0, "fit_loop": SimpleNamespace(epoch_loop=loop)}
    data.trainer = SimpleNamespace(**counts)  # type: ignore[assignment]
    assert data.state_dict()["sequences"] == 4


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_refuses_other_data(target: Target, library: Path, tmp_path: Path) -> None:
    data = make(library, tmp_path)
    data.prepare(target)
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(data, 2, tmp_path, [saver])
    for option in ({"limit": 20}, {"temperatures": (2.0,), "batch_size": 1}, {"seed": 1}):
        other = make(library, tmp_path, **option)
        other.prepare(target)
        with pytest.raises(UserError, match="trained on other data"):
            run(other, 3, tmp_path, [], ckpt_path=tmp_path / "saved" / "step=2.ckpt")


def test_answers_may_be_sampled_as_the_target_is_served(target: Target, library: Path, tmp_path: Path) -> None:
    data = make(library, tmp_path, temperatures=("served", 0))
    data.prepare(target)
    assert data.describe()["temperatures"] == ["served", 0.0]


def test_ranks_share_validation_without_loss_or_repetition(
    target: Target, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(library, tmp_path, validation_limit=None, sequence_length=64)
    data.prepare(target)
    everything = sorted(d for batch in data.val_dataloader() for d in documents(batch))
    shares = []
    for rank in range(3):
        monkeypatch.setattr(data, "_rank", lambda rank=rank: (rank, 3))
        shares.append(list(data.val_dataloader()))
    assert len({len(share) for share in shares}) == 1
    assert sorted(d for share in shares for batch in share for d in documents(batch)) == everything


def test_the_shipped_config_makes_the_module() -> None:
    conf = Path(__file__).parents[2] / "conf"
    with initialize_config_dir(str(conf), version_base=None):
        config = compose("data/python-stdlib", overrides=["+seed=3", "+evaluation.benchmark=python-stdlib"])
    data = instantiate(config).data
    assert isinstance(data, DataModule)
    assert data.preparation.generation.seed == 3
    assert data.preparation.sequence_length == 512
    assert not data.preparation.benchmark  # its own source holds them out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("batch_size", 0), ("batch_size", "four"), ("num_workers", -1), ("read_ahead", -1), ("sequence_length", 1)],
        *[("sequence_length", "long"), ("limit", 0), ("limit", "all"), ("validation_limit", 2.5), ("num_proc", 0)],
        *[("max_new_tokens", 0), ("generation_batch_size", "many")],
    ],
)
def test_bad_numbers_are_refused_at_once(library: Path, tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"data\.{name} is {value}: expected a whole number of at least"):
        make(library, tmp_path, **{name: value})


@pytest.mark.parametrize("temperatures", [0.5, "warm"])
def test_temperatures_are_a_list(library: Path, tmp_path: Path, temperatures: Any) -> None:
    with pytest.raises(UserError, match=rf"data\.temperatures is {temperatures}: expected a list of numbers"):
        make(library, tmp_path, temperatures=temperatures)


def test_long_conversations_of_the_source_are_split_not_left_out(target: Target, library: Path, tmp_path: Path) -> None:
    whole, split = (make(library, tmp_path, regenerate=False, sequence_length=n) for n in (128, 32))
    whole.prepare(target)
    split.prepare(target)
    assert split.describe()["train_split"] > 0
    assert split.describe()["train_left_out"] == 0
    assert split.describe()["train_supervised_tokens"] == whole.describe()["train_supervised_tokens"]
