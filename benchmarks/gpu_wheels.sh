#!/usr/bin/env bash
# Fetch what benchmarks/gpu.py needs beside torch and transformers, for Python 3.12 on x86-64: gpu_wheels.sh FOLDER
set -euo pipefail
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest "$1" \
    attrs==26.1.0 cattrs==26.2.1
