# Everything runs in an environment of its own; nothing outside this folder is touched. The tests need more packages
# than the demo, which therefore does not wait for them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(VENV)/.lab
READY := $(VENV)/.ready
# Bytecode is kept, whatever the environment says: without it each of the tests' many processes compiles every module again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quickstart test check pytest test-all test-versions release-check bench dist docs figures gpu-test ray-test mutations clean

# Threads that wait asleep, not spinning: on a machine with other work the demo is several times as fast for it.
demo: $(LAB)  ## the paper's experiment, small: AdamW, AdamWN at AdamW's own norm, and AdamWN at a gain of 0.8
	OMP_WAIT_POLICY=passive $(BIN)/normcontrol challenge --preset tiny --steps 300 --arms adamwn adamwn:gain=0.8 --out runs/demo

quickstart: $(LAB)  ## train a small network with AdamW and with AdamWN, and show both norms
	$(BIN)/python examples/quickstart.py

test: $(READY)  ## lint, types, tests, doctests
	$(MAKE) --no-print-directory --jobs 2 check pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A JAX that does not know the flag would end with an error; the one of constraints.txt compiles a third quicker with it.
pytest: $(READY)
	XLA_FLAGS=--xla_cpu_use_fusion_emitters=false $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

test-all: test  ## and the slow tests, some of which need more packages
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

bench: $(READY)  ## time and memory beside torch's own AdamW, as ratios
	$(BIN)/python benchmarks/step_cpu.py --json results/step_cpu.json
	$(BIN)/python benchmarks/startup.py --json results/startup.json
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/lab_cpu.py
	$(BIN)/python benchmarks/study.py --json results/study_cpu.json
	$(BIN)/python benchmarks/report_page.py
	$(BIN)/python benchmarks/sharded.py --json results/sharded.json
	$(BIN)/python benchmarks/methods.py --json results/methods_cpu.json

docs: $(READY)  ## the documentation as a site, in site/; a broken link is an error
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html, or: $(BIN)/python -m http.server --directory site"

figures: $(READY)  ## draw the figures of the documentation anew
	$(BIN)/python docs/figures/make_figures.py
	$(BIN)/python docs/figures/make_flow.py
	$(BIN)/python examples/quickstart.py --figure docs/figures/quickstart.png
	$(BIN)/python examples/grokking.py --figure docs/figures/grokking.png
	$(BIN)/python tools/notebook.py docs/tutorial.ipynb
	$(BIN)/python docs/make_results.py
	$(BIN)/python docs/figures/make_transfer.py
	$(BIN)/python docs/figures/make_settle.py
	$(BIN)/python docs/figures/make_search.py
	$(BIN)/python docs/figures/make_budget.py
	$(BIN)/python benchmarks/predict.py --draw results/predict_tiny.json --figure docs/figures/predict.png
	$(BIN)/python benchmarks/predict.py --draw results/predict_small.json --figure docs/figures/predict_small.png

dist: $(READY)  ## wheel and sdist, checked, and each installed and tried in a clean environment
	rm -rf dist
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dist]'
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/dist.py dist/*

release-check: docs  ## what a release needs: distributions in clean environments, README, docs, versions, changelog
	rm -rf dist
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dist]'
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/release.py dist/*

test-versions:  ## the core tests on the oldest, the pinned and the newest torch; downloads gigabytes, and deletes them
	$(PYTHON) tools/versions.py

ray-test: $(READY)  ## studies on Ray: a cluster of two nodes on this machine, one of which is killed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest -m slow -k ray tests/lab/study

mutations: $(READY)  ## break the controller, one line at a time: the tests must notice; half an hour
	$(BIN)/python tools/mutations.py

gpu-test:  ## the tests that need CUDA, with the Python that has it
	PYTHONPATH=src $(PYTHON) -m pytest -m cuda $$(grep -rl --include='test_*.py' 'mark\.cuda' tests)

# torch first: the pinned CPU build satisfies every later requirement, so that pip never fetches the CUDA one.
# pip would compile 20,000 modules one after the other; compileall does so on all cores, without the tests of other
# packages and hundreds of models. Some modules are templates, and cannot be compiled.
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
$(LAB): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable '.[lab]'
	touch $(LAB)

$(READY): $(LAB)
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps --upgrade --target $(VENV)/timm timm torchvision  # tests/integrations/with_timm.py says why
	$(BIN)/python -m compileall -q -j 0 -x '/tests/|/transformers/models/' $(VENV)/lib >/dev/null || true
	touch $(READY)

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
