# Every target sets up what it needs: a virtual environment in .venv, exact versions from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

# Without bytecode, which --no-compile leaves to the first import, every new Python would compile torch again: 7 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo app pictures docs check test random lint pytest dist

# Of 22,000 files that pip would compile, Python imports less than a fifth, and compiles those itself.
# setuptools warns of each folder of templates and data, which setup.py has as data of its package.
PIP := PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# Of what pip says: each file that it fetches with its size, the end, and errors; no line for a place without packages.
SHELL := /bin/bash -o pipefail
SAID := 2> >(grep -v "is ignored: it is neither" >&2) | sed -un 's/^ *\(Downloading .* (.*)\)$$/\1/p; s/^Installing collected packages.*/Installing them/p'

install: .venv/installed

.venv/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip  # the one that comes with Python 3.11 takes twice as long
	@echo "pip install --editable '.[dev]', 2.3 GB on the disk"
	@$(PIP:--quiet=) --progress-bar off --editable '.[dev]' $(SAID)
	touch $@

demo: install
	$(BIN)/icebear demo

app: install
	$(BIN)/icebear app

pictures: install
	$(BIN)/icebear index --limit 1000 --store docs/pictures.db
	$(BIN)/icebear label --auto --prompt "The ice bear lives in the" --store docs/pictures.db
	$(BIN)/icebear atlas --store docs/pictures.db
	$(BIN)/icebear concept find music --with examples/music.txt --without examples/not-music.txt --store docs/pictures.db
	$(BIN)/python docs/pictures.py docs/pictures.db

docs: install
	$(BIN)/python docs/api.py
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/notebooks.py
	$(BIN)/zensical build --clean --strict

# The files of a release, in dist/, looked at as the package index does, and used where nothing else is.
dist: install
	rm -rf dist build
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PIP) --editable '.[dev,ray,servers]'
	$(MAKE) pytest MARKS=release

# Type checkers and import-linter find a package in folders only: build/typed has links, laid out as they are installed.
FOLDERS := app claims explanation evaluation actmax steering concepts lrp models db

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/deptry $(FOLDERS) icebear
	rm -rf build/typed && mkdir -p build/typed/icebear
	ln -s $(addprefix $(CURDIR)/,$(FOLDERS) $(wildcard icebear/*)) build/typed/icebear
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache
	cd build/typed && $(CURDIR)/$(BIN)/lint-imports $(CURDIR)/pyproject.toml --no-cache

# Processes of one thread each do more on the same cores than one process with all threads; half as many again as cores,
# because some wait for a browser or for other processes.
pytest: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)) --maxprocesses 6 --dist worksteal -m "$(MARKS)"

# The type checker, which has one process, runs beside the tests.
check: install
	$(MAKE) --jobs=2 lint pytest MARKS="not (real or network or browser or release)"

test: install
	$(MAKE) --jobs=2 lint pytest MARKS="not release"

# The tests that draw, with another seed each time.
random: install
	ICEBEAR_TEST_SEED=$$(shuf -i 1-999999 -n 1) $(BIN)/pytest tests/test_index.py tests/test_topk.py tests/test_ranking.py \
	tests/test_rules.py tests/test_steering.py tests/test_evaluation.py tests/test_pieces.py tests/test_store.py
