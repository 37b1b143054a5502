# Each target installs what it needs into .venv first. PY=python3 uses that interpreter as it is and installs nothing.

ifdef PY
runtime :=
dev :=
else
override PY := .venv/bin/python
runtime := .venv/runtime
dev := .venv/dev
endif

.PHONY: help setup bench amp limit scale loss memory test diff clean

help:
	@echo 'make setup         what the stages need, into .venv'
	@echo 'make bench         all stages, a table      (ARGS="s05 s11 --steps 20" for flags of bench.py)'
	@echo 'make amp           float32, float16 and bfloat16 side by side'
	@echo 'make limit         the largest batch that fits'
	@echo 'make scale         s12 on one process, two, ...'
	@echo 'make loss          held-out loss of s06 to s08 after the same tokens, at three learning rates'
	@echo 'make memory        s01 with and without what the harness does for memory on a CPU'
	@echo 'make test          the tests, on the CPU'
	@echo 'make diff N=5      what stage 5 changes     (A=s01 B=s12 for any two)'
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

amp limit scale loss memory: $(runtime)
	@$(PY) bench.py $@ $(ARGS)

test: $(dev)
	@$(PY) -m pytest -q -n 2 --dist loadfile $(ARGS)

# git colors it where the terminal can, and -w leaves out lines that only moved to the right
diff:
	@if [ -n "$(A)" ] && [ -n "$(B)" ]; then old="$(A)"; new="$(B)"; \
	else new=$$(expr "$(N)" + 0 2>/dev/null) || new=0; old=$$(expr $$new - 1); \
	  new=$$(printf s%02d $$new); old=$$(printf s%02d $$old); fi; \
	old_file=$$(ls stages/$$old*.py 2>/dev/null | head -n 1); new_file=$$(ls stages/$$new*.py 2>/dev/null | head -n 1); \
	if [ -z "$$old_file" ] || [ -z "$$new_file" ]; then \
	  echo "make diff: pass N=2 or a later stage, or A=s01 B=s12" >&2; exit 2; fi; \
	git --no-pager diff --no-index -w $$old_file $$new_file || true

clean:
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
