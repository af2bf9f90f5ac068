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

PY    := .venv/bin/python
# The stamp's name holds this folder, so that a moved or copied checkout installs itself anew.
STAMP := .venv/.installed$(EXTRAS)$(subst /,-,$(CURDIR))

# Kernels come from .venv, not from the home folder; pip's --user has no place in an environment.
export JUPYTER_PREFER_ENV_PATH := 1
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run lab test figures post record bench readme notebooks lint hooks install

help:
	@echo "make run        install, execute all notebooks on 4 ranks, draw figures, print the results"
	@echo "make lab        open the notebooks in JupyterLab"
	@echo "make test       run every test, notebooks included"
	@echo "make figures    draw all figures again from traces/, without training"
	@echo "make post       the series as static pages in build/post/, or parts: PARTS='0[34]*'"
	@echo "make record     record the runs again: RECORD_PRESET=$(RECORD_PRESET) RANKS=$(RANKS)"
	@echo "make bench      race all variants against torch's own: benchmarks/RESULTS.md"
	@echo "make notebooks  refresh the committed notebooks from notebooks/percent/"
	@echo "make readme     the README's picture and results table, from traces/"
	@echo "make lint       ruff"
	@echo "make hooks      check before each commit (pre-commit)"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python=$(PYTHON); if test -x $(PY); then python=$(PY); fi; \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; $$python is `$$python --version 2>&1 | tail -n 1`." \
	    "Name one: make PYTHON=python3.12 (and remove .venv if an older one made it)."; exit 1; }
	@test -x $(PY) || { echo "Making .venv ..."; \
	  $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }; }
	@echo "Installing the package and the versions of constraints.txt into .venv ..." \
	  "(minutes, the first time)"
	@$(PY) -m pip install -qq -e ".$(if $(EXTRAS),[$(EXTRAS)])" -c constraints.txt
	@rm -f .venv/.installed* && touch $(STAMP)

run: $(STAMP)
	@$(PY) tools/run_notebooks.py --out build/run
	@$(PY) -m zero1_helpers figures
	@$(PY) -m zero1_helpers report
	@echo
	@echo "Executed notebooks: build/run/    Figures: figures/    To work through them: make lab"

lab: $(STAMP)
	@$(PY) -m jupyterlab --ServerApp.root_dir="$(CURDIR)" \
	  --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

test: $(STAMP)
	@$(PY) -m pytest --nbmake --nbmake-timeout=600 tests notebooks $(ARGS)

figures: $(STAMP)
	@$(PY) -m zero1_helpers figures $(ARGS)

post: $(STAMP)
	@$(PY) tools/make_post.py --out build/post --only "$(PARTS)" $(ARGS)

record: $(STAMP)
	@variants=`$(PY) -c 'from zero1_helpers.training.variants import variants_of; print(*variants_of("$(RECORD_PRESET)"))'` && \
	for variant in $$variants; do echo "Recording $(RECORD_PRESET), $$variant ..."; \
	  $(PY) -m zero1_helpers record --variant $$variant --preset $(RECORD_PRESET) \
	    --ranks $(RANKS) --steps 4 $(RECORD_ARGS) --out traces/$(RECORD_PRESET)/$$variant || exit 1; done

bench: $(STAMP)
	@$(PY) benchmarks/race.py $(ARGS)

readme: $(STAMP)
	@$(PY) tools/refresh_readme.py

notebooks: $(STAMP)
	@$(PY) tools/run_notebooks.py --in-place

lint: $(STAMP)
	@$(PY) -m ruff check

hooks: $(STAMP)
	@$(PY) -m pre_commit install
