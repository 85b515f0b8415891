"""``specdraft chat checkpoint=PATH``; ``--help`` says more."""

import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "chat")
def main(config: DictConfig) -> None:
    """Load target and drafter, answer what is asked, draw what was said if that is wanted."""
    record = None if config.record is None else Path(config.record)
    if record is not None and record.suffix != ".svg":
        raise UserError(f"record is {config.record}: expected the path of a picture, FILE.svg")
    if config.checkpoint is None and config.target.name is None:
        said = "there is nothing to talk to"
        raise UserError(f"{said}: expected checkpoint=PATH of a drafter, which names its target, or target=NAME")
    chosen = HydraConfig.get().runtime.choices.get("drafter")  # drafter=none is a choice, too
    if config.checkpoint is not None and chosen is not None:
        said = f"checkpoint= and drafter={chosen} both say what drafts"
        raise UserError(f"{said}: expected one of them; target=NAME names a target without a checkpoint")
    # Imported here so that --help answers at once.
    from rich.console import Console

    from specdraft.chat.conversation import Conversation, check_settings
    from specdraft.chat.loop import is_typed, read_questions, talk
    from specdraft.chat.screen import Screen, write_svg
    from specdraft.drafters.base import Drafter
    from specdraft.drafters.checkpoint import check_target, complete_target, load_drafter, other_options
    from specdraft.drafters.prompt_lookup import PromptLookup
    from specdraft.evaluation import EvaluationSettings
    from specdraft.evaluation.tuning import tuned_target
    from specdraft.files import make_directory

    if record is not None:
        make_directory(record.parent)
    untrained = PromptLookup() if chosen is None else build(config.drafter)
    drafter, trained = (untrained, {}) if config.checkpoint is None else load_drafter(config.checkpoint)
    if not isinstance(drafter, Drafter | None):
        raise UserError("drafter=auto chooses by measuring: expected the name of what `evaluate.py drafter=auto` chose")
    if config.decoding.num_draft_tokens is None:
        config.decoding.num_draft_tokens = trained.get("extra", {}).get("decoding", {}).get("num_draft_tokens", 5)
    settings = EvaluationSettings.from_config(dict(config.decoding), config.seed)
    check_settings(settings, config.plain_every)
    complete_target(config.target, trained)
    target = build(config.target)
    if trained:
        check_target(trained, target)
        if other := other_options(trained, target):
            print(f"note: {other}", file=sys.stderr)
    if drafter is not None:
        drafter.to(target.device, target.dtype)
        target = tuned_target(target, drafter)
    conversation = Conversation(target, drafter, settings, config.system, config.plain_every)
    screen = Screen(Console(), config.show_rejected)
    questions = [config.questions] if isinstance(config.questions, str) else config.questions or []
    given = [str(question) for question in questions]
    try:
        with conversation.ready():
            screen.greet(conversation.description)
            talk(conversation, screen, read_questions(given, sys.stdin), is_typed(given, sys.stdin))
        screen.sum_up(conversation.answers)
    finally:
        if record is not None and conversation.answers:
            write_svg(record, conversation.description, conversation.answers, config.show_rejected)
            screen.say(f"recorded: {record}")


if __name__ == "__main__":
    main()
