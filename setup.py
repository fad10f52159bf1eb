"""The folders at the top of this repository become one package: `concepts/` is installed as `icebear.concepts`."""

from setuptools import find_packages, setup

FOLDERS = "app claims explanation evaluation actmax steering concepts lrp models db".split()

setup(
    packages=["icebear", *(f"icebear.{name}" for folder in FOLDERS for name in find_packages(include=[f"{folder}*"]))],
    package_dir={f"icebear.{folder}": folder for folder in FOLDERS},
)
