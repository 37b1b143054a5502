# Each target installs what it needs into .venv first. PY=python3 uses that interpreter as it is and installs nothing.

ifdef PY
runtime :=
dev :=
else
override PY := .venv/bin/python
runtime := .venv/runtime
dev := .venv/dev
endif

.PHONY: help setup bench amp limit scale loss test diff clean

help:
	@echo 'make setup         what the stages need, into .venv'
	@echo 'make bench         all stages, a table      (ARGS="s05 s11 --steps 20" for flags of bench.py)'
	@echo 'make amp           float32, float16 and bfloat16 side by side'
	@echo 'make limit         the largest batch that fits'
	@echo 'make scale         s12 on one process, two, ...'
	@echo 'make loss          held-out loss of s06 to s08 after the same tokens, at three learning rates'
	@echo 'make test          the tests, on the CPU'
	@echo 'make diff N=5      what stage 5 changes'
	@echo 'make clean         remove .venv and caches, keep results'
	@echo 'PY=python3 with any of them uses that Python and installs nothing'

setup: $(runtime)

.venv/runtime: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 is %d.%d: put 3.11 or newer on the PATH, or pass PY=" % sys.version_info[:2])'
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/dev: requirements-dev.txt .venv/runtime
	.venv/bin/python -m pip install --quiet -r requirements-dev.txt
	touch $@

bench: $(runtime)
	@$(PY) bench.py $(ARGS)

amp limit scale loss: $(runtime)
	@$(PY) bench.py $@ $(ARGS)

test: $(dev)
	@$(PY) -m pytest -q -n 2 --dist loadfile $(ARGS)

# git colors it where the terminal can, and -w leaves out lines that only moved to the right
diff:
	$(if $(N),,$(error pass N=2 or a later stage, as in make diff N=5))
	@old=$$(printf 's%02d' $$(($(N) - 1))); new=$$(printf 's%02d' $(N)); \
	git --no-pager diff --no-index -w stages/$${old}_*.py stages/$${new}_*.py || true

clean:
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
