"""What is no Python file is in the package as well, so that an installed command finds its templates."""

import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_every_file_of_the_package_is_installed():
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {
        file
        for package, patterns in declared.items()
        for pattern in patterns
        for file in REPOSITORY.joinpath(*package.split(".")).glob(pattern)
    }
    others = {
        file
        for file in (REPOSITORY / "specdraft").rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc") and "__pycache__" not in file.parts
    }
    assert others - installed == set() and len(others) > 5
