# make train, test, check, lint, course, student, grade, slides, myths: each first puts what it needs into .venv, again when pyproject.toml changes.
#
#     make train STAGE=3 N=4 ARGS="--steps 50"

PYTHON ?= python3
STAGE ?= 2
N ?= 2
ARGS ?=

.PHONY: train test check matrix lint course lessons student grade slides myths
.NOTPARALLEL:

# One thread a rank, as torchrun would set it with a warning.
train: .venv/installed
	@test "$(N)" -ge 1 2> /dev/null || { echo "make train: N must be a whole number >= 1 (got $(N))"; exit 2; }
	OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc-per-node $(N) zero_mini/train_gpt.py --stage $(STAGE) $(ARGS)

# Two files at a time: most tests are ranks that wait for each other, and tests of a file share what they start.
# There are more processes than cores then, and threads of OpenMP spin while they wait: one thread each, and none spins
# where a test asks for more.
test check: export OMP_NUM_THREADS = 1
test check: export OMP_WAIT_POLICY = passive
test: .venv/installed-test
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile \
		--nbval --nbval-current-env --nbval-kernel-startup-timeout 180 notebooks --ignore notebooks/student

# One look at each claim, in under a minute: parity, a mistake that parity sees, wire, memory, late collectives, an
# ordinary script, refusals, a dead rank, a checkpoint. tests/README.md has the claims.
check: .venv/installed-test
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile -m "check and not gpu" $(ARGS) \
		tests/book tests/memory tests/binding tests/checkpoint

# A quick part of the tests on Python 3.10 to 3.13, each with three releases of torch; fewer, and builds without CUDA:
#     make matrix ARGS="--python 3.12 --torch 2.9 newest --index-url https://download.pytorch.org/whl/cpu"
matrix:
	$(PYTHON) tests/matrix.py $(ARGS)

course: .venv/installed-lessons
	.venv/bin/jupyter lab $(ARGS) notebooks

# For who changes a lesson: run them all again, in place.
lessons: .venv/installed-lessons
	.venv/bin/python notebooks/execute.py notebooks/*.ipynb

student: .venv/installed-student
	.venv/bin/jupyter nbconvert --to notebook --output-dir notebooks/student --ClearOutputPreprocessor.enabled=True \
		--NotebookExporter.preprocessors=nbgrader.preprocessors.ClearSolutions \
		--ClearSolutions.enforce_metadata=False notebooks/*.ipynb

# A student's my_zero.py (docs/my_zero.md): points, one line each. ARGS="--json report.json" for a classroom tool.
FILE ?= notebooks/my_zero.py
grade: .venv/installed-lessons
	@.venv/bin/python -m zero_mini.course.judge "$(FILE)" $(ARGS)

# What ZeRO is not: every experiment of zero_mini/laboratory, a table, and runs/myths.json. About three minutes.
myths: .venv/installed
	.venv/bin/python -m zero_mini.laboratory $(ARGS)

# HTML and PDF in slides/build; BROWSER=/path/to/chrome if it is not found. See slides/README.md.
BROWSER ?=
slides: .venv/installed-lessons slides/node_modules/.package-lock.json
	.venv/bin/python slides/assemble.py
	cd slides && node build.mjs $(if $(BROWSER),--browser $(BROWSER))
	cd slides && node check.mjs $(if $(BROWSER),--browser $(BROWSER))

slides/node_modules/.package-lock.json: slides/package-lock.json
	@command -v npm > /dev/null || { echo "slides need Node.js 20 or newer, with npm: https://nodejs.org"; exit 1; }
	cd slides && npm ci --no-audit --no-fund
	touch $@

lint: .venv/installed-lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# The Python of the environment, or the one that would make it. A venv that could not be made is not left half done.
HERE = $(or $(wildcard .venv/bin/python),$(PYTHON))
.venv/installed-test: EXTRA = [test,lessons,strangers,student]
.venv/installed-lessons: EXTRA = [lessons]
.venv/installed-student: EXTRA = [lessons,student]
.venv/installed-lint: EXTRA = [lint]
.venv/installed .venv/installed-test .venv/installed-lessons .venv/installed-student .venv/installed-lint: pyproject.toml
	@$(HERE) -c "import sys; sys.exit(sys.version_info < (3, 10))" || { \
		echo "make: Python 3.10 or newer is needed, and $(HERE) is $$($(HERE) --version 2>&1 || true)"; \
		echo "make: remove .venv if it is there, and name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	.venv/bin/python -m pip install --editable ".$(EXTRA)"
	touch $@
