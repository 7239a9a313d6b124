# Metaloom's everyday commands. `make help` lists them.

RECIPE ?= promp-half-cheetah-dir
ITERATIONS ?= 20
SECONDS ?= 60
SEED ?= 1
COUNT ?= 40
ROOM ?=
ARGS ?=

BIN := .venv/bin
READY := .venv/ready

# The first interpreter that is new enough. Running each finds out, because a name on PATH need not work.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

# torch's own threads help little and collapse when another process takes a core; telemetry stays off.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export DO_NOT_TRACK = 1
export PREFECT_SERVER_ANALYTICS_ENABLED = false

# Three processes on two cores, as tests often wait; whole files of tests, in order: what they share is made once.
PARALLEL = -n 3 --dist loadfile --no-loadscope-reorder
SUITE = -m "not learning and not sweep"
# They sync all that they store, and nobody needs it afterwards: in memory, where that has 4 GB and may run programs, syncing
# takes no time. `make sweep` stores on the disk.
MEMORY = /dev/shm
TEMPORARY = $(shell test "$$(df --output=avail $(MEMORY) 2>/dev/null | tail -n 1)" -gt 4000000 2>/dev/null && \
	cp /bin/true $(MEMORY)/metaloom-true && $(MEMORY)/metaloom-true && echo TMPDIR=$(MEMORY); rm -f $(MEMORY)/metaloom-true)

# It asks for MuJoCo 3.3.0, which has no batches, and works with ours all the same; so without its dependencies.
METAWORLD = metaworld==3.1.1

.PHONY: help setup metaworld train test suite leaks coverage lint style types layers serve learning sweep digests mutants \
	fuzz newest bench field docs dist reader lock

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile

setup: $(READY)  ## create .venv with the pinned dependencies; does nothing when it is up to date

metaworld: $(READY)  ## the package of the Meta-World environments; `make setup` has installed it
	$(BIN)/python -m pip install --only-binary :all: --no-deps '$(METAWORLD)'

train: $(READY)  ## meta-train RECIPE for ITERATIONS iterations; ARGS="--run NAME" and the like are passed on
	$(BIN)/metaloom train $(RECIPE) --set iterations=$(ITERATIONS) $(ARGS)

# Types take a minute of one processor, beside which the first tests run.
test: $(READY) style  ## the whole CI suite: linters, types, layers, tests
	@$(MAKE) --no-print-directory --jobs 3 types layers suite

# Most processes that tests start live for a second. Where Python writes no bytecode, a tenth of it is to compile ours.
suite: $(READY)
	@$(BIN)/python -m compileall -qq metaloom pipeline stages storage flows || true
	$(TEMPORARY) $(BIN)/pytest $(PARALLEL) $(SUITE) --durations=10 $(ARGS)

leaks: $(READY)  ## the suite once more, looking for what a test leaves to those after it: threads, variables, ports
	METALOOM_LEAKS=1 $(TEMPORARY) $(BIN)/pytest $(PARALLEL) $(SUITE) $(ARGS)

coverage: $(READY)  ## the lines that the suite does not reach; takes half as long again
	$(TEMPORARY) $(BIN)/pytest $(PARALLEL) $(SUITE) --cov --cov-report=term-missing:skip-covered $(ARGS)

lint: $(READY) style  ## the checks that need no run: ruff, the word list, pyright, import-linter
	@$(MAKE) --no-print-directory --jobs 2 --output-sync types layers

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/wordlist.py

types: $(READY)  ## pyright; then that it knows the type of every public name, as a user's type checker sees them
	$(BIN)/pyright
	@mkdir -p build
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes metaloom --ignoreexternal > build/types.txt \
		|| { cat build/types.txt; exit 1; }

layers: $(READY)  ## import-linter
	$(BIN)/lint-imports

serve: $(READY)  ## Prefect server, page and worker on 127.0.0.1:4200; ARGS="--port 4300" for another port
	@$(BIN)/metaloom serve $(ARGS)

learning: $(READY)  ## the tests that train for minutes
	$(BIN)/pytest -m learning $(ARGS)

sweep: $(READY)  ## the faults of which the tests try a sample, all of them: about an hour
	$(BIN)/pytest -m sweep $(ARGS)

digests: $(READY)  ## check that no number has moved: a small run of each algorithm, and every reference run; minutes
	$(BIN)/python -W ignore tests/digests.py $(ARGS)

mutants: $(READY)  ## plant COUNT faults, drawn by SEED from the folder ROOM, one at a time: which do the tests notice?
	$(TEMPORARY) nice -n 10 $(BIN)/python tests/mutants.py --seed $(SEED) --count $(COUNT) --room "$(ROOM)" $(ARGS)

# Beside .venv, because it has wheels for Linux alone.
fuzz: $(READY)  ## fuzz every reader for SECONDS each, guided by what of its code an input reaches
	test -d build/fuzz/atheris || $(BIN)/python -m pip install --quiet --only-binary :all: --target build/fuzz 'atheris>=3,<4'
	cd build/fuzz && PYTHONPATH=. ../../$(BIN)/python ../../tests/fuzz/fuzz.py $(SECONDS)

# For a weekly job: it is what a user gets who installs today. It prints the versions that are not those of the lock.
newest: $(READY)  ## run the core's tests with the newest version of every dependency, in build/newest
	$(BIN)/python -m venv build/newest
	build/newest/bin/python -m pip install --upgrade --upgrade-strategy eager --only-binary :all: --editable '.[dev]'
	build/newest/bin/python -m pip install --only-binary :all: --no-deps '$(METAWORLD)'
	build/newest/bin/python -m pip freeze --all --exclude-editable | sed 's/+[a-z0-9.]*$$//' > build/newest.txt
	@grep --invert-match --line-regexp --fixed-strings --file requirements.lock build/newest.txt || true
	$(TEMPORARY) build/newest/bin/pytest $(PARALLEL) $(SUITE) tests/pipeline tests/stages tests/storage $(ARGS)

bench: $(READY)  ## every benchmark, one after the other
	@for name in startup sampling meta_optimize store iteration replay_buffer pearl_update; do \
		echo "== benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py || exit 1; done

field: $(READY)  ## train environments of other packages, each installed under build/field: an hour; ARGS="popgym carl" for some
	$(BIN)/python benchmarks/field.py $(ARGS)

docs: $(READY)  ## the documentation as a site with search, in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo build/site/index.html

# The wheel is made of what the source distribution holds, and neither of what an earlier build left.
dist: $(READY)  ## source distribution and wheel, in dist/
	rm -rf build/lib build/bdist.* dist metaloom.egg-info
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" > /dev/null
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	rm -rf metaloom.egg-info
	@ls dist

reader: dist  ## install the wheel with the packages that read runs, in build/reader, and read a run with them
	$(BIN)/python -m venv --clear build/reader
	build/reader/bin/python -m pip install --quiet --only-binary :all: --no-deps dist/*.whl
	build/reader/bin/python -m pip install --quiet --only-binary :all: $$(sed -n 's/^pip install \(cyclopts .*\)/\1/p' docs/installing.md)
	METALOOM_RUNS=tests/fixtures build/reader/bin/metaloom verify metaloom-1
	build/reader/bin/python -c "import metaloom; print(metaloom.open_run('tests/fixtures/metaloom-1').steps().to_pandas())"
	@du -sh build/reader

lock: $(READY)  ## resolve requirements.lock again, with torch held at its version in the file
	rm -rf build/lock && mkdir -p build
	grep '^torch==' requirements.lock > build/torch.txt
	$(BIN)/python -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade pip
	build/lock/bin/python -m pip install --only-binary :all: --constraint build/torch.txt --editable '.[dev]'
	{ sed -n '/^#/p' requirements.lock; \
	  build/lock/bin/python -m pip freeze --all --exclude-editable | sed 's/+[a-z0-9.]*$$//'; \
	  grep '; python_' requirements.lock; } > build/requirements.lock
	mv build/requirements.lock requirements.lock

# Without the clone's own path, a clone named metaloom hides the package from whoever is in the folder that contains it.
SITE = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# The pip that comes with Python 3.11 resolves at half the speed of later ones. Half of the rest is compiling, on one
# processor. Some packages bring templates that are no Python, so that may fail.
# The stamp is the last thing written, so an interrupted set-up is taken up again by the next call.
$(READY): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer on PATH. Install one, or name it:" \
		"make setup PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade --constraint requirements.lock pip
	$(BIN)/python -m pip install --no-compile --only-binary :all: --constraint requirements.lock --editable '.[dev]'
	$(BIN)/python -m pip install --no-compile --only-binary :all: --no-deps '$(METAWORLD)'
	@echo "$(CURDIR)" > "$(SITE)/metaloom.pth"
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $(READY)
