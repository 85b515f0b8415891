"""Put conversations into the package: ``python -m specdraft.embedded.conversations FILE.jsonl ... DIR``.

``FILE.jsonl`` is what ``specdraft regenerate output=FILE.jsonl`` wrote, ``DIR`` is ``specdraft/embedded/NAME``: the
conversations are then ``data.path=embedded://NAME`` everywhere, a compressed Parquet file with a card that says how
they were made. ``embedded://NAME`` among the files adds the others to what is there already."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from specdraft.data.regeneration.questions import normalized
from specdraft.data.sources.records import Record, read_records
from specdraft.errors import UserError, exit_on_user_error
from specdraft.files import atomic_directory
from specdraft.rendering import render

_LEVEL = 22  # of zstandard, its best: written once, read at any level's speed


def embed(sources: Sequence[str], directory: Path, command: str) -> Path:
    """Write the conversations of ``sources`` into ``directory``, whole or not at all; of those that begin with the same
    question the first. Raises UserError for a file that is missing, empty, or holds anything else."""
    from pyarrow import Table
    from pyarrow.parquet import write_table

    records: list[Record] = []
    asked: set[str] = set()
    for source in sources:
        found = list(read_records(source, None, "train", streaming=False))
        wrong = next((each.origin for each in found if each.error or "messages" not in each.fields), None)
        if wrong is not None or not found:
            said = f"{wrong} is no conversation" if wrong else f"{source} is empty"
            raise UserError(f"{said}: expected a file that specdraft regenerate output=... wrote")
        for record in found:
            question = normalized(_question(record))
            if question not in asked:
                asked.add(question)
                records.append(record)
    keys = ("role", "content")
    rows = [
        {
            "messages": [{key: message[key] for key in keys} for message in record.fields["messages"]],
            "cut": bool(record.fields.get("cut")),
        }
        for record in records
    ]
    letters = Counter[str]()
    for record in records:
        for message in record.fields["messages"]:
            letters[message["role"]] += len(message["content"])
    card = render("embedded/conversations.md.jinja", rows=rows, letters=letters, command=command)
    with atomic_directory(directory) as temporary:
        table = Table.from_pylist(rows)
        write_table(table, temporary / "conversations.parquet", compression="zstd", compression_level=_LEVEL)
        (temporary / "README.md").write_text(card, encoding="utf-8")
    return directory


def _question(record: Record) -> str:
    return next((m["content"] for m in record.fields["messages"] if m["role"] == "user"), "")


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="what specdraft regenerate wrote, and embedded://NAME to add to")
    parser.add_argument("directory", type=Path, help="the folder to write")
    parser.add_argument("--command", required=True, help="how the file was made, for the card")
    arguments = parser.parse_args()
    print(embed(arguments.sources, arguments.directory, arguments.command))


if __name__ == "__main__":
    main()
