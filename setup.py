"""The folders at the top of this repository become one package: `concepts/` is installed as `icebear.concepts`."""

from setuptools import find_packages, setup

FOLDERS = ("concepts", "actmax", "steering", "db", "app")

setup(
    packages=["icebear", *(f"icebear.{name}" for folder in FOLDERS for name in find_packages(include=[f"{folder}*"]))],
    package_dir={f"icebear.{folder}": folder for folder in FOLDERS},
)
