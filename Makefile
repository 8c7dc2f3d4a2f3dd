# make demo     set up .venv and run the main job
# make test     set up .venv and run the tests
# make check    ruff, mypy, clang-format
# make support-table    try every model type of transformers, write docs/support-models.md
#
# TORCH=2.14.1             another torch, or pip arguments: TORCH="torch==2.13.0 --index-url URL"
# EXTRAS=cu-torch211       more extras of pyproject.toml, comma-separated
# PYTHON=python3           use this interpreter as it is, and install nothing
# WORKERS=2                test processes; default: 2, and 0 (this one) where there is a GPU
# TESTS=..., PYTEST_ARGS=..., DEMO_ARGS=...    what to run
VENV ?= .venv
TORCH ?=
EXTRAS ?=
TESTS ?= graph_tests
PYTEST_ARGS ?=
DEMO_ARGS ?=
WORKERS ?= $(if $(wildcard /dev/nvidia0),0,2)

ifdef PYTHON
RUN := $(PYTHON)
installed = have-$(1)
triton :=
else
RUN := $(VENV)/bin/python
installed = $(VENV)/.installed-$(1)
triton := +triton
endif

# A torch or extras other than those of the last time: set up again.
REQUEST := $(strip $(TORCH) $(EXTRAS))
ifneq ($(REQUEST),)
ifneq ($(REQUEST),$(shell cat $(VENV)/.request 2>/dev/null))
again := force
endif
endif

.PHONY: help demo test check support-table clean force
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(call installed,hf)
	@$(RUN) -m megamoe_compile decode $(DEMO_ARGS) || \
	{ code=$$?; echo; $(RUN) -m megamoe_compile doctor; exit $$code; }

# One thread in each test process: more would only spin against the other's.
test: $(call installed,hf+test$(triton))
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest $(TESTS) -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

check: $(call installed,hf+test$(triton)+dev)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -c 'import clang_format; clang_format.clang_format()' --dry-run -Werror csrc/*/*

support-table: $(call installed,hf+test$(triton))
	OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN) graph_tests/support/model_types.py > docs/.support-models.md
	mv docs/.support-models.md docs/support-models.md

# The + between extras is a comma that make does not take for one.
$(VENV)/.installed-%: pyproject.toml .ci/setup $(again)
	@bash .ci/setup $(VENV) "$$(echo '$*' | tr + ,)$(EXTRAS:%=,%)" "$(TORCH)"
	@echo '$(REQUEST)' > $(VENV)/.request
	@touch $@ $(VENV)/.installed-hf

have-%:
	@$(RUN) .ci/missing.py $(subst +, ,$*)

clean:
	rm -rf $(VENV) build dist *.egg-info
