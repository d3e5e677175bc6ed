# Works with GNU make 4 and with macOS's make 3.81.
# make lab PYTHON=python3.12     create .venv with this Python
# make lab LANGUAGE=zh           open the lessons in Chinese (or en, both), now and later
# make lab VENV=~/envs/course    use this folder for the environment instead of .venv
# make lab TORCH=cpu             install torch without CUDA, which is gigabytes smaller on Linux; .venv keeps this build
# make lab ARGS="--no-browser --port 8899"
# make test WORKERS=4            run the tests in 4 processes

# `make gpu PYTHON=python3` runs with a machine's own Python and installs nothing; without PYTHON it uses .venv.
GPU_PYTHON_GIVEN := $(PYTHON)
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?=
ARGS   ?=
LANGUAGE ?=

$(if $(filter-out cpu,$(TORCH)),$(error TORCH must be cpu or empty, got "$(TORCH)"; if it is empty, pip chooses the build))
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# `make test-library` creates a separate environment, with every package except torch at its pinned version.
TORCH_VERSION ?= newest
OTHER_VENV := .venv-torch-$(TORCH_VERSION)
LIBRARY_TESTS := accumulation attention attention_kernels budget budget_command budget_models \
  budget_ranks budget_search caching_allocator memory_categories checkpoint configs \
  memory_devices distributed memory_formulas memory_gradient_sums \
  budget_hugging_face memory_measurement memory_meter models offload memory_saved_tensors \
  schedule symbolic_shape_cache simulated symbolic
LIBRARY_NEEDS := numpy matplotlib pandas tqdm transformers pytest pytest-xdist hypothesis checkpoint-schedules

BIN       := $(VENV)/bin
# These files mark what is installed. INSTALLED stands for all that a learner needs. COMPLETE also stands for the 1.1 GB
# that `make test`, `site` and `slides` need in addition.
INSTALLED := $(VENV)/.course-installed
COMPLETE  := $(VENV)/.course-test-installed
CPU_TORCH := $(VENV)/.course-torch-cpu
# An environment with the CPU build keeps it, even if a later call does not set TORCH.
BUILD     := $(if $(TORCH),$(CPU_TORCH),$(wildcard $(CPU_TORCH)))
INSTALL    = $(BIN)/python -m pip install
TRUSTED   := $(VENV)/.course-trusted
OVERRIDES := $(VENV)/share/jupyter/lab/settings/overrides.json
FILE_LIST := $(VENV)/etc/jupyter/jupyter_server_config.json
KERNEL    := $(VENV)/etc/ipython/ipython_kernel_config.json
# Every target that starts kernels depends on these files, so that the tests run the lessons as JupyterLab does.
SETTINGS  := $(OVERRIDES) $(FILE_LIST) $(KERNEL)
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
# Worker processes of the tests; `auto` is the number that fits the cores and the memory (tests/tools/workers.py).
WORKERS ?= auto
# --dist=loadscope lets one worker run all tests of a file. The cells of a notebook also share a kernel.
WITH_WORKERS := -n $(WORKERS) --dist=loadscope --no-loadscope-reorder
# Compares every notebook with its stored outputs. Only a kernel that hangs can exceed the timeouts (tests/tools/timeouts.py).
WITH_NOTEBOOKS := --nbval --nbval-current-env --nbval-sanitize-with=tests/lessons/nbval.cfg --nbval-cell-timeout=3600 \
  --nbval-kernel-startup-timeout=3600
# Where this variable forbids Python to store compiled modules, each process of the tests compiles the library again.
test browser: export PYTHONDONTWRITEBYTECODE =

GPU_PYTHON = PYTHONPATH=. $(or $(GPU_PYTHON_GIVEN),$(BIN)/python)
GPU_NEEDS  = $(if $(GPU_PYTHON_GIVEN),,$(COMPLETE))
# Uses several workers if pytest-xdist is installed.
GPU_WORKERS = $(if $(shell $(GPU_PYTHON) -c 'import xdist' 2>&1),,-n $(WORKERS))
OUT       ?= build/gpu

.PHONY: help install lab update results test check hooks test-library seconds browser bench gpu gpu-allocator gpu-tests gpu-record gpu-bench notebooks site student slides handout pages grade address clean

help: ## show this list / 显示本列表
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

# Learners work on a copy in work/, which git ignores. JupyterLab's file list shows only the files of that folder.
lab: $(INSTALLED) $(SETTINGS) ## open your copy of the lessons, work/, in JupyterLab / 打开你自己的一份课程 work/
	$(BIN)/python -m publish.work$(LANGUAGE:%= --language %)
	$(BIN)/jupyter-lab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir=work $(ARGS) work/00_start_here.ipynb

update: $(INSTALLED) ## bring new editions of lessons into work/, keep your answers / 更新 work/ 里的课，保留你的答案
	$(BIN)/python -m publish.work --update

# The server's root is the whole folder, so that links from lessons to docs/ work. Cells that are run again also draw the
# pictures for slides.
results: $(INSTALLED) $(SETTINGS) $(TRUSTED) ## open the lessons as stored, with results, for instructors / 打开带结果的课（教师用）
	COURSE_SLIDES=1 $(BIN)/jupyter-lab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir=. $(ARGS) $(wildcard notebooks/00_start_here.ipynb)

install: $(INSTALLED) $(SETTINGS) $(TRUSTED) ## install all that `make lab` needs, without opening JupyterLab / 只安装，不打开 JupyterLab

test: $(COMPLETE) $(SETTINGS) ## run lint, unit tests, and every notebook against its outputs / 检查代码，运行全部测试，核对各课输出
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summary=none
	$(BIN)/python -m pytest $(WITH_NOTEBOOKS) $(WITH_WORKERS) --junitxml=build/tests.xml $(ARGS)

check: $(COMPLETE) ## check what you changed, within a minute (ARGS=offload: this package) / 一分钟内检查你的改动
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summary=none
	@$(BIN)/python tests/tools/check_changes.py --workers $(WORKERS) $(ARGS)

hooks: ## check subject, lint and format at each commit, with hooks of git / 提交时自动检查提交说明和代码
	git config core.hooksPath .githooks

seconds: $(COMPLETE) ## print the seconds per file of the last `make test` (ARGS=--write) / 上次 make test 中各文件的秒数
	@$(BIN)/python tests/tools/seconds.py $(ARGS)

test-library: | $(OTHER_VENV)/bin/pip ## test the library alone with another torch (TORCH_VERSION=2.9.0) / 用别的 torch 版本测试库
	grep -vE '^(torch|triton|nvidia|cuda)' constraints.txt > $(OTHER_VENV)/constraints.txt
	$(OTHER_VENV)/bin/python -m pip install --upgrade torch$(if $(filter newest,$(TORCH_VERSION)),,==$(TORCH_VERSION)) \
	  $(if $(TORCH),--no-deps --index-url $(TORCH_INDEX))
	$(OTHER_VENV)/bin/python -m pip install torch $(LIBRARY_NEEDS) -c $(OTHER_VENV)/constraints.txt
	PYTHONPATH=. $(OTHER_VENV)/bin/python -m pytest -p no:cacheprovider -q $(WITH_WORKERS) \
	  $(LIBRARY_TESTS:%=tests/library/test_%.py) $(ARGS)

$(OTHER_VENV)/bin/pip:
	$(PYTHON) -m venv $(OTHER_VENV)

browser: $(COMPLETE) $(SETTINGS) ## run only the tests in Chromium (CHROMIUM=path of a browser) / 只运行浏览器测试
	$(BIN)/python -m pytest -p no:cacheprovider -q -m browser tests $(ARGS)

bench: $(COMPLETE) ## the scoreboard: this library beside its peers (ARGS="memory offload") / 与同类工具对比
	$(BIN)/python benchmarks $(ARGS)

gpu: $(GPU_NEEDS) ## run the next four, even if one of them fails; ARGS go to gpu-record / 依次运行以下四项，一项失败也继续
	@$(GPU_PYTHON) -m course_lib.lessons --check
	@failed=; $(MAKE) gpu-allocator ARGS= || failed="$$failed gpu-allocator"; \
	$(MAKE) gpu-tests ARGS= || failed="$$failed gpu-tests"; \
	$(MAKE) gpu-record || failed="$$failed gpu-record"; \
	$(MAKE) gpu-bench ARGS= || failed="$$failed gpu-bench"; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

gpu-allocator: $(GPU_NEEDS) ## compare the simulated allocator with this GPU's own / 对照模拟的分配器与 GPU 真正的分配器
	@$(GPU_PYTHON) -m course_lib.lessons --check
	$(GPU_PYTHON) -m pytest -p no:cacheprovider -rs -m gpu tests/library/test_caching_allocator.py $(ARGS)

gpu-tests: $(GPU_NEEDS) ## run the GPU tests (ARGS="-k offload") / 运行 GPU 测试
	@$(GPU_PYTHON) -m course_lib.lessons --check
	$(GPU_PYTHON) -m pytest -p no:cacheprovider -rs --durations=10 -m gpu $(GPU_WORKERS) tests $(ARGS)

gpu-record: $(GPU_NEEDS) ## record the lessons' GPU figures (ARGS="--only 04 06.attention --skip 07") / 记录各课的 GPU 数据
	@$(GPU_PYTHON) -m course_lib.lessons $(ARGS)

gpu-bench: $(GPU_NEEDS) ## run the benchmarks that have a GPU part (OUT=build/gpu) / 运行 GPU 性能对比
	@$(GPU_PYTHON) -m course_lib.lessons --check
	@mkdir -p $(OUT)
	@failed=; for bench in attention offload; do echo "== $$bench"; \
	  $(GPU_PYTHON) benchmarks/gpu_$$bench.py --output $(OUT)/$$bench.json $(ARGS) || failed="$$failed $$bench"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

notebooks: $(INSTALLED) $(SETTINGS) ## run notebooks/scripts, and store the notebooks with outputs (ARGS="02 03") / 重新生成 notebook
	$(BIN)/python -m publish.notebooks $(ARGS)

site: $(COMPLETE) ## build the website in build/site (ARGS="--output PLACE") / 生成网站
	$(BIN)/python -m publish.site $(ARGS)

slides: $(COMPLETE) ## build a deck per lesson and language in build/slides / 生成幻灯片
	$(BIN)/python -m publish.slides $(ARGS)

handout: slides ## print the decks as PDF into build/handout; needs Chromium (ARGS go to slides) / 幻灯片的 PDF 讲义，需要 Chromium
	$(BIN)/python -m publish.handout

student: $(INSTALLED) ## write the notebooks without solutions to build/student / 生成不含答案的学生版
	$(BIN)/python -m publish.student $(ARGS)

pages: $(INSTALLED) ## write each lesson in one language, for VS Code, Colab and previews / 每课每种语言一份 notebook
	$(BIN)/python -m publish.pages $(ARGS)

grade: $(INSTALLED) $(SETTINGS) ## grade the notebooks in build/handed_in / 批改交上来的 notebook
	$(BIN)/python -m publish.grade $(ARGS)

address: $(INSTALLED) ## write the addresses in [project.urls] into READMEs and CITATION.cff / 写入项目地址
	$(BIN)/python -m publish.address

clean: ## remove caches and build files; the next target checks .venv again / 清理缓存
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(INSTALLED) $(COMPLETE) $(TRUSTED)
	find course_lib publish notebooks tests \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# `python -m venv` installs pip last, so if its creation was interrupted, pip is missing and the creation is repeated.
$(BIN)/pip:
	@$(PYTHON) -c '' 2>/dev/null || \
	  { echo "There is no '$(PYTHON)' here: install Python 3.11, 3.12 or 3.13, or name one, as in make lab PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info[:2] < (3, 14) or sys.exit("$(PYTHON) is Python %d.%d, but the course needs 3.11, 3.12 or 3.13: name one, as in make lab PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments: install its venv package (python3-venv on Debian and Ubuntu)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Only torch comes from PyTorch's index; its dependencies come from PyPI. PyPI's build, which is the one with CUDA, also
# satisfies torch==2.13.0. So this file has the version of the CPU build, torch==2.13.0+cpu, and is a second file of
# constraints for every later call of pip.
$(CPU_TORCH): constraints.txt | $(BIN)/pip
	@$(INSTALL) --upgrade --no-deps --index-url $(TORCH_INDEX) $(shell sed -n 's/^\(torch==[^;# ]*\).*/\1/p' constraints.txt)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(INSTALLED): pyproject.toml constraints.txt $(BUILD) | $(BIN)/pip
	@echo "Installing what the course needs: minutes the first time, then never again. / 安装课程所需的软件：首次要几分钟，以后不再需要。"
	@$(INSTALL) -e '.[course]' -c constraints.txt $(BUILD:%=-c %)
	@touch $@

$(COMPLETE): $(INSTALLED)
	@echo "Installing what the tests, the website and the slides need in addition. / 另外安装测试、网站和幻灯片所需的软件。"
	@$(INSTALL) -e '.[course,docs,test]' -c constraints.txt $(BUILD:%=-c %)
	@touch $@

# These settings keep all cells in the page, so that the language switch in the first cell also works when the reader has
# scrolled away. In the file list they hide the dates to show longer names, and they open the glossary as a rendered page.
$(OVERRIDES): publish/jupyterlab/overrides.json $(INSTALLED)
	@mkdir -p $(@D)
	@cp $< $@

# This configuration hides notebooks/scripts from the file list, where its files would look like lessons, and keeps
# jupytext from writing a reader's answers into them.
$(FILE_LIST): publish/jupyterlab/server.json $(INSTALLED)
	@mkdir -p $(@D)
	@cp $< $@

# When JupyterLab opens a notebook, it writes the kernel's language and version into it, and marks the notebook as
# changed if its file has another version. With this configuration the kernel reports version "3" instead of the exact
# version of Python. The stored lessons also contain "3", so opening one does not change it on any machine.
$(KERNEL): publish/jupyterlab/ipython_kernel_config.json $(INSTALLED)
	@mkdir -p $(@D)
	@cp $< $@

# JupyterLab strips styles from notebooks that it does not trust, and with them the language switch.
$(TRUSTED): $(NOTEBOOKS) $(INSTALLED)
	@test -z "$(NOTEBOOKS)" || $(BIN)/jupyter-trust $(NOTEBOOKS)
	@touch $@
