# make train, test, lint, course, student: each first puts what it needs into .venv, again when pyproject.toml changes.
#
#     make train STAGE=3 N=4 ARGS="--steps 50"

PYTHON ?= python3
STAGE ?= 2
N ?= 2
ARGS ?=

.PHONY: train test lint course student
.NOTPARALLEL:

train: .venv/installed
	.venv/bin/torchrun --standalone --nproc-per-node $(N) zero_mini/train_gpt.py --stage $(STAGE) $(ARGS)

test: .venv/installed-test
	.venv/bin/python -m pytest $(ARGS)
	.venv/bin/python -m pytest --nbval --nbval-current-env notebooks --ignore notebooks/student

course: .venv/installed-lessons
	.venv/bin/jupyter lab notebooks

student: .venv/installed-student
	.venv/bin/jupyter nbconvert --to notebook --output-dir notebooks/student --ClearOutputPreprocessor.enabled=True \
		--NotebookExporter.preprocessors=nbgrader.preprocessors.ClearSolutions \
		--ClearSolutions.enforce_metadata=False notebooks/*.ipynb

lint: .venv/installed-lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/installed-test: EXTRA = [test,lessons,student]
.venv/installed-lessons: EXTRA = [lessons]
.venv/installed-student: EXTRA = [lessons,student]
.venv/installed-lint: EXTRA = [lint]
.venv/installed .venv/installed-test .venv/installed-lessons .venv/installed-student .venv/installed-lint: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --editable ".$(EXTRA)"
	touch $@
