"""What pyproject.toml cannot say: ``conf/`` at the top of the repository is installed as data of the package."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["specdraft*"]), "specdraft.conf"], package_dir={"specdraft.conf": "conf"})
