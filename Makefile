# The doors of the project; `make` alone lists them.
# Another Python: make run PYTHON=python3.12    More for pytest or lab: make test ARGS="-k parity"
# With DeepSpeed to compare with: make run EXTRAS=deepspeed

PYTHON        ?= python3
RECORD_PRESET ?= small
# One link for all runs, set by hand after the rule of --link auto; so many tokens that computing dominates.
RECORD_ARGS   ?= --link '62MB/s + 7ms' --batch-size 80
RANKS         ?= 4
PARTS         ?= *
ARGS          ?=
EXTRAS        ?=

PY := sh tools/python.sh
comma := ,

# Kernels come from .venv, not from the home folder; pip's --user has no place in an environment.
export JUPYTER_PREFER_ENV_PATH := 1
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run lab test check figures post record bench readme notebooks lint hooks install

help:
	@echo "make run        install, execute all notebooks on 4 ranks, draw figures, print the results"
	@echo "make lab        open the notebooks in JupyterLab"
	@echo "make test       run every test, notebooks included"
	@echo "make check      lint and the quick tests, in less than a minute: before each commit"
	@echo "make figures    draw all figures again from traces/, without training"
	@echo "make post       the series as static pages in build/post/, or parts: PARTS='0[34]*'"
	@echo "make record     record the runs again: RECORD_PRESET=$(RECORD_PRESET) RANKS=$(RANKS)"
	@echo "make bench      race all variants against torch's own: benchmarks/RESULTS.md"
	@echo "make notebooks  refresh the committed notebooks from notebooks/percent/"
	@echo "make readme     the README's badges, picture and results table, from pyproject.toml and traces/"
	@echo "make lint       ruff"
	@echo "make hooks      check before each commit (pre-commit)"

install:
	@sh tools/install.sh "$(PYTHON)" "notebooks,figures,tests$(if $(EXTRAS),$(comma)$(EXTRAS))"

run: install
	@$(PY) tools/run_notebooks.py --out build/run
	@$(PY) -m zero1_helpers figures
	@$(PY) -m zero1_helpers report
	@echo
	@echo "Executed notebooks: build/run/    Figures: figures/    To work through them: make lab"

lab: install
	@$(PY) -m jupyterlab --ServerApp.root_dir="$$PWD" \
	  --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

test: install
	@$(PY) -m pytest --nbmake --nbmake-timeout=600 tests notebooks $(ARGS)

check: lint
	@$(PY) -m pytest -q -m quick tests $(ARGS)

figures: install
	@$(PY) -m zero1_helpers figures $(ARGS)

post: install
	@$(PY) tools/make_post.py --out build/post --only "$(PARTS)" $(ARGS)

record: install
	@variants=`$(PY) -c 'from zero1_helpers.training.variants import variants_of; print(*variants_of("$(RECORD_PRESET)"))'` && \
	for variant in $$variants; do echo "Recording $(RECORD_PRESET), $$variant ..."; \
	  $(PY) -m zero1_helpers record --variant $$variant --preset $(RECORD_PRESET) \
	    --ranks $(RANKS) --steps 4 $(RECORD_ARGS) --out traces/$(RECORD_PRESET)/$$variant || exit 1; done

bench: install
	@$(PY) benchmarks/race.py $(ARGS)

readme: install
	@$(PY) tools/refresh_readme.py
	@$(PY) tools/one_click.py --write

notebooks: install
	@$(PY) tools/run_notebooks.py --in-place

lint: install
	@$(PY) -m ruff check -q
	@mkdir -p build; $(PY) .venv/bin/lint-imports --no-cache > build/imports.txt || { cat build/imports.txt; exit 1; }

hooks: install
	@$(PY) -m pre_commit install
