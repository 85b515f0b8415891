"""A drafter on disk and back."""

import tempfile
from pathlib import Path

from specdraft.check.outcome import Failed
from specdraft.check.rounds import Recording, compare, count
from specdraft.check.subject import Subject
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.errors import UserError


def loads_as_saved(subject: Subject) -> str:
    """Saved as a training does, loaded as an evaluation does: the same drafts. A difference is a weight or an option
    that the checkpoint does not hold: the drafter is good in training, and bad once it is loaded."""
    drafter = subject.drafter()
    target = subject.decoding_target(drafter)
    with tempfile.TemporaryDirectory(prefix="specdraft-check-") as directory:
        saved = save_drafter(drafter.served(), Path(directory) / "drafter", subject.target.identity)
        try:
            loaded, _ = load_drafter(saved)
        except UserError as error:
            mend = "note all that its constructor takes with constructor_arguments(locals())"
            raise Failed(f"its checkpoint does not load ({str(error).replace(directory, '')}); {mend}") from error
    loaded.to(subject.target.device, subject.target.dtype)
    if loaded.config() != drafter.served().config():
        raise Failed("a loaded drafter has other arguments than the saved one: expected the same in `config`")
    other = subject.decoding_target(loaded)
    before, after = (Recording(*pair).run(subject.prompts) for pair in ((drafter, target), (loaded, other)))
    if said := compare(before, after, subject.close):
        mend = "make every weight a parameter or a persistent buffer, and every option an argument that is noted"
        raise Failed(f"a loaded drafter drafts otherwise than the saved one ({said}): expected the same; {mend}")
    return f"{count(before)} drafts of the saved drafter and of the loaded one"
