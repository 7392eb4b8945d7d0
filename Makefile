# make train, make test, make lint: each first puts what it needs into .venv, again when pyproject.toml changes.
#
#     make train STAGE=3 N=4 ARGS="--steps 50"

PYTHON ?= python3
STAGE ?= 2
N ?= 2
ARGS ?=

.PHONY: train test lint
.NOTPARALLEL:

train: .venv/installed
	.venv/bin/torchrun --standalone --nproc-per-node $(N) zero_mini/train_gpt.py --stage $(STAGE) $(ARGS)

test: .venv/installed-test
	.venv/bin/python -m pytest $(ARGS)

lint: .venv/installed-lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/installed-test: EXTRA = [test]
.venv/installed-lint: EXTRA = [lint]
.venv/installed .venv/installed-test .venv/installed-lint: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --editable ".$(EXTRA)"
	touch $@
