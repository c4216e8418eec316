# Two commands do everything: `make demo` and `make test`. Both set up .venv on first use.
# TORCH is the torch requirement; pin or narrow it where a smaller build lies at hand, for example
#   make test TORCH=torch==2.13.0
TORCH ?= torch>=2.11
PYTHON ?= python3
BIN := .venv/bin

# Two workers side by side, one where there is a GPU (tests/conftest.py); a file's tests stay together.
SHARED := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test clients fuzz soak clean FORCE

demo: .venv/.base
	@echo "== The demo model answers (first use fetches 93 MB) =="
	$(BIN)/python -m runtime demo --prompt "What is the capital of France? Tell me one thing about it." --max-tokens 48
	@echo "== What a token costs =="
	$(BIN)/python -m bench latency --model demo --prompt-len 64 --gen-len 32 --batch 1 --reps 3 --warmup 1

test: .venv/.test
	@echo "== Lint =="
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== Types =="
	$(BIN)/mypy
	@echo "== Tests =="
	$(BIN)/python -m pytest $(SHARED)

fuzz: .venv/.test
	FUZZ_SHARE=1 $(BIN)/python -m pytest tests/models/test_fuzz.py
	$(BIN)/python -m tests.server.abuse fuzz

soak: .venv/.test
	$(BIN)/python -m tests.server.abuse soak

clients: .venv/.base .venv-clients/.made
	.venv-clients/bin/python tests/server/clients.py $(BIN)/python

.venv-clients/.made:
	@echo "== Setting up .venv-clients: they bring some hundred packages =="
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install "$(TORCH)"
	.venv-clients/bin/python -m pip install openai litellm langchain-openai aiperf guidellm "lm-eval[api]"
	@touch $@

# What TORCH .venv was made with; another one that is asked for renews it.
.venv/.torch: FORCE
	@mkdir -p .venv
	@test -e $@ -a "$(origin TORCH)" = file || echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

# Sets up .venv with the extras $(1).
define venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quartet needs Python 3.11 or newer; set PYTHON=/path/to/python")'
@echo "== Setting up .venv ($(TORCH)); the first time takes some minutes =="
$(PYTHON) -m venv .venv
$(BIN)/python -m pip install "$(TORCH)" --editable ".$(1)"
@touch $@
endef

.venv/.base: pyproject.toml .venv/.torch
	$(call venv)

.venv/.test: pyproject.toml .venv/.torch
	$(call venv,[test])
	@touch .venv/.base

clean:
	rm -rf .venv .venv-clients build *.egg-info
