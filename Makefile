# Every target sets up what it needs: a virtual environment in .venv, exact versions from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo app pictures test lint

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/icebear demo

app: install
	$(BIN)/icebear app

pictures: install
	$(BIN)/icebear index --limit 1000 --store docs/pictures.db
	$(BIN)/python docs/pictures.py docs/pictures.db

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest
