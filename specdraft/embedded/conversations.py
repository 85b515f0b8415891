"""Put conversations into the package: ``python -m specdraft.embedded.conversations FILE.jsonl DIR``.

``FILE.jsonl`` is what ``specdraft regenerate output=FILE.jsonl`` wrote, ``DIR`` is ``specdraft/embedded/NAME``: the
conversations are then ``data.path=embedded://NAME`` everywhere, a compressed Parquet file with a card that says how
they were made."""

import argparse
from collections import Counter
from pathlib import Path

from specdraft.data.sources.records import read_lines
from specdraft.errors import UserError, exit_on_user_error
from specdraft.files import atomic_directory
from specdraft.rendering import render

_LEVEL = 22  # of zstandard, its best: written once, read at any level's speed


def embed(source: Path, directory: Path, command: str) -> Path:
    """Write the conversations of ``source`` into ``directory``, whole or not at all. Raises UserError for a file that
    is missing, empty, or holds anything else."""
    from pyarrow import Table
    from pyarrow.parquet import write_table

    if not source.is_file():
        raise UserError(f"there is no {source}: expected a file that specdraft regenerate output=... wrote")
    records = list(read_lines(source))
    wrong = next((each.origin for each in records if each.error or "messages" not in each.fields), None)
    if wrong is not None or not records:
        said = f"{wrong} is no conversation" if wrong else f"{source} is empty"
        raise UserError(f"{said}: expected a file that specdraft regenerate output=... wrote")
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


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a .jsonl file that specdraft regenerate wrote")
    parser.add_argument("directory", type=Path, help="the folder to write")
    parser.add_argument("--command", required=True, help="how the file was made, for the card")
    arguments = parser.parse_args()
    print(embed(arguments.source, arguments.directory, arguments.command))


if __name__ == "__main__":
    main()
