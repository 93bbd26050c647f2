PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-extended check install proto options clean

install: $(VENV)/.installed

# Rebuilt when what is installed changes; the pins make two installs equal.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[torch,dev]' -c constraints.txt
	touch $@

demo: install
	$(BIN)/exo-train demo

test: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# The same faults of real processes at more phases: minutes more, no other kind.
test-extended: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m extended

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/architecture -p no:cacheprovider

# Generated with the oldest grpcio-tools we promise, so that older installs can import it.
proto: install
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
		proto/exo_train/wire/pb/*.proto

# The page of train's options, out of the code.
options: install
	$(BIN)/python -m exo_train.cli.options_page > docs/options.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
