"""What a folder holds."""

from pathlib import Path


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}
