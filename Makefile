# Each target installs what it needs into .venv first. PY=python3 uses that interpreter as it is and installs nothing.

ifdef PY
runtime :=
dev :=
else
override PY := .venv/bin/python
runtime := .venv/runtime
dev := .venv/dev
endif

.PHONY: help setup bench amp limit scale test diff clean

help:
	@echo 'make setup         what the stages need, into .venv'
	@echo 'make bench         all stages, a table      (ARGS="s05 s11 --steps 20" for flags of bench.py)'
	@echo 'make amp           float32, float16 and bfloat16 side by side'
	@echo 'make limit         the largest batch that fits'
	@echo 'make scale         s12 on one process, two, ...'
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

amp limit scale: $(runtime)
	@$(PY) bench.py $@ $(ARGS)

test: $(dev)
	@$(PY) -m pytest -q -n 2 --dist loadfile $(ARGS)

# The docstrings are left out. git colors the rest where the terminal can, and -w leaves out lines that only moved to the
# right. N=05 is N=5.
diff:
	@new=$$(ls stages/s$$(printf '%02d' '$(N:0%=%)' 2>/dev/null)_*.py 2>/dev/null); \
	old=$$(ls stages/s$$(printf '%02d' $$(( $(or $(N:0%=%),0) - 1 )))_*.py 2>/dev/null); \
	if [ ! -f "$$old" ] || [ ! -f "$$new" ]; then echo 'error: pass the number of a stage from 2 on, as in make diff N=5' >&2; exit 2; fi; \
	folder=$$(mktemp -d); \
	for stage in "$$old" "$$new"; do sed '1,/^"""$$/d' "$$stage" > "$$folder/$$(basename $$stage)"; done; \
	cd "$$folder" && git --no-pager diff --no-index -w $$(basename $$old) $$(basename $$new); \
	status=$$?; rm -r "$$folder"; test $$status -le 1

clean:
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
