"""Who takes part, and their servers: started here and ended here, or running already."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from tqdm import tqdm

from specdraft.bench.advice import PLAIN
from specdraft.bench.engines import NGRAM, Contender, ServingEngine
from specdraft.bench.process import Server, ended_by_signals
from specdraft.bench.streaming import model_of
from specdraft.bench.turns import Place
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.drafters.checkpoint import load_drafter
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.text import counted


def contenders(
    engine: ServingEngine,
    export_engine: type,
    checkpoints: Sequence[Path],
    draft_tokens: Sequence[int],
    ngram: bool,
    folder: Path,
) -> list[Contender]:
    """Plain first, then n-gram drafts and every head, each with every number of draft tokens. Heads are exported into
    ``folder``. Raises UserError for heads that the engine does not serve, and if there is nothing to compare."""
    if any(k < 1 for k in draft_tokens):
        raise UserError(f"draft_tokens is {list(draft_tokens)}: expected numbers of tokens from 1 upwards")
    found = [Contender(PLAIN, PLAIN)]
    if ngram:
        found += [Contender(f"{NGRAM} K={k}", NGRAM, k, tuple(engine.ngram(k))) for k in draft_tokens]
    for number, checkpoint in enumerate(checkpoints):
        drafter, _ = load_drafter(checkpoint)
        directory = export(checkpoint, export_engine(engine.dtype), folder / f"head-{number}").resolve()
        name = drafter.family if len(checkpoints) == 1 else f"{drafter.family} {number + 1}"
        for k in draft_tokens:
            if (options := engine.head(drafter.family, str(directory), k)) is None:
                raise UserError(f"{engine.name} does not draft with {drafter.family}: expected a head that it serves")
            found.append(Contender(f"{name} K={k}", name, k, tuple(options), directory))
    if len(found) == 1 and draft_tokens:
        raise UserError("there is nothing beside plain decoding: expected checkpoint=PATH, or ngram=true")
    return found


def running(url: str | None, plain_url: str | None) -> list[Contender]:
    """Contenders of servers that others started. Raises UserError for addresses that are none, or the same."""
    found = []
    for name, setting, address in ((PLAIN, "plain_url", plain_url), ("drafting", "url", url)):
        if address is None:
            continue
        if not address.startswith(("http://", "https://")):
            raise UserError(f"{setting} is {address!r}: expected a server's address, such as http://localhost:8000")
        found.append(Contender(name, name, url=address.rstrip("/").removesuffix("/v1")))
    if len(found) == 2 and found[0].url == found[1].url:
        raise UserError(f"url and plain_url are both {url}: expected two servers, with drafting and without")
    return found


@contextmanager
def served(
    wanted: Iterable[Contender],
    engine: ServingEngine,
    target: str,
    revision: str | None,
    model: str | None = None,
    key: str = "",
) -> Iterator[dict[str, Place]]:
    """Where each contender is served. What is started here is ended here, also by Ctrl-C or a signal to end.
    Raises UserError where an engine does not start or dies, where all do not fit in memory, or a running server does
    not answer."""
    with ended_by_signals(), ExitStack() as stack:
        places: dict[str, Place] = {}
        everyone = list(wanted)
        for each in tqdm(everyone, "starting servers" if target else "asking servers", unit="server"):
            if each.url is not None:
                places[each.name] = Place(each.url, model or model_of(each.url, key))
                continue
            started = [place.server for place in places.values() if place.server is not None]
            for other in started:
                other.check()
            if started:
                _check_memory(started[0].memory(), len(everyone) - len(started))

            def command(port: int, name: str, options: Sequence[str] = each.options) -> list[str]:
                return engine.server(target, revision, options, port, name)

            server = Server(command, engine.environment(available_cores()), engine.start_timeout)
            stack.callback(server.end)
            places[each.name] = Place(server.url, server.model, server)
        yield places


def _check_memory(each: int, missing: int) -> None:
    """Raises UserError where ``missing`` more servers of ``each`` bytes do not fit: a machine without memory ends
    one of them minutes later, without a word of why."""
    free = psutil.virtual_memory().available
    if missing * each > free:
        wrong = f"{counted(missing, 'server')} more of {each / 1e9:.1f} GB each do not fit in {free / 1e9:.1f} GB"
        mend = "fewer draft_tokens or checkpoints, ngram=false, or flags by which a server takes less"
        raise UserError(f"{wrong}: expected room for all at once, as they take turns; give {mend}")
