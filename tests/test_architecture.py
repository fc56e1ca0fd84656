"""The house: which module may import which, and what every script owes its reader before it works."""

from __future__ import annotations

import argparse
import ast
import resource
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_script

COMMON = ROOT / "common"
SCRIPTS = sorted(path.stem for path in ROOT.glob("0*.py"))

# From the ground floor up; a module imports from its own floor and those below, and never in a circle.
FLOORS = (
    {"errors", "log", "atomic_io", "cli", "hub"},
    {
        *("manifest", "conversations", "dataset", "draft_vocab", "layouts", "sources", "split", "workers"),
        *("partition", "shards", "store_forms", "trim"),
    },
    {
        "verifier",
        "checkpoint",
        "inference_pool",
        "vllm_server",
        "hidden_states",
        "demo_verifier",
        "content_check",
    },
    {
        *("chat", "responses", "generation", "capture", "capture_vllm", "capture_transformers"),
        *("capture_rows", "load_test", "online"),
        *("head_flags", "head_config", "head_rows", "drafter", "loaders", "train_checkpoints", "training"),
        *("acceptance", "processes", "train_inputs", "train_metrics", "transfer"),
        *("train_guards", "anchor", "loader_memory"),
    },
    {
        *("warm_start", "step0", "evaluation", "report", "train_start", "train_output"),
        *("model_card", "training_plan", "plan_sizes"),
    },
)
# Runs inside of vLLM's process, where nothing else of ours is wanted.
APART = {"vllm_connector"}
GROUND = {"errors", "log"}
# Modules that --help must not wait for.
HEAVY = {"torch", "transformers", "datasets", "speculators", "vllm", "openai", "matplotlib", "pandas"}


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file names, also inside of functions and for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def modules() -> set[str]:
    return {path.stem for path in COMMON.glob("*.py")} - {"__init__"}


def ours(path: Path) -> set[str]:
    """The modules of common/ that a file imports."""
    return {parts[1] for name in imports(path) if (parts := name.split("."))[0] == "common" and parts[1:]} & (
        modules()
    )


def floor(module: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if module in names)


# ----------------------------------------------------------------------------------------------------------
# common/


def test_every_module_has_its_floor() -> None:
    placed = [name for names in FLOORS for name in names]
    assert len(placed) == len(set(placed))
    assert modules() == set(placed) | APART


@pytest.mark.parametrize("module", sorted(modules() - APART))
def test_a_module_imports_nothing_from_above(module: str) -> None:
    above = {name for name in ours(COMMON / f"{module}.py") if name in APART or floor(name) > floor(module)}
    assert not above, f"{module} (floor {floor(module)}) imports {above}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: ours(COMMON / f"{module}.py") for module in modules()}).prepare()


@pytest.mark.parametrize("module", sorted(APART))
def test_what_runs_inside_of_vllm_stands_alone(module: str) -> None:
    assert ours(COMMON / f"{module}.py") <= GROUND


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_never_imports_a_script(module: str) -> None:
    assert not {name for name in imports(COMMON / f"{module}.py") if name.split(".")[0] in SCRIPTS}


@pytest.mark.parametrize("file", [*(f"common/{name}" for name in sorted(modules())), *SCRIPTS])
def test_nothing_unpickles(file: str) -> None:
    """`pickle` is named only where its error is caught; arrays and tensors are read without it."""
    for node in ast.walk(ast.parse((ROOT / f"{file}.py").read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        call = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert call not in ("pickle.load", "pickle.loads"), f"line {node.lineno}"
        if call == "torch.load":
            assert keywords.get("weights_only") == "True", f"line {node.lineno}"
        if call == "np.load":
            assert keywords.get("allow_pickle") == "False", f"line {node.lineno}"


# ----------------------------------------------------------------------------------------------------------
# Scripts


def test_the_six_stages_are_here() -> None:
    assert SCRIPTS == [
        "01_prepare_data",
        "01b_generate_synthetic",
        "02_build_vocab_map",
        "03_capture_hidden",
        "04_train",
        "05_evaluate",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_comes_at_once_and_imports_nothing_heavy(script: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{script}.py', '--help']\n"
        "try:\n"
        f"    runpy.run_path('{script}.py', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        f"    print('heavy:', sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\n"
        "    raise\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "heavy: []"
    # Seconds of a processor and not of the clock, which other work on the machine stretches.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert "--run-dir" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_docstring_is_how_to_run_it(script: str) -> None:
    doc = ast.get_docstring(ast.parse((ROOT / f"{script}.py").read_text())) or ""
    assert doc.count(f"{script}.py") >= 3, "three commands: real, many GPUs or an endpoint, a laptop"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_a_help_text_and_every_boolean_its_no(script: str) -> None:
    for action in load_script(script).build_parser()._actions:
        assert action.help, f"{action.option_strings} has no help text"
        if action.const is True and action.nargs == 0:
            assert action.dest == "print_config" or isinstance(action, argparse.BooleanOptionalAction)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_stage_has_the_flags_that_all_have(script: str) -> None:
    flags = set(load_script(script).build_parser()._option_string_actions)
    assert {"--config", "--print-config", "--run-dir", "--overwrite", "--accept-stale", "--debug"} <= flags


@pytest.mark.parametrize("script", SCRIPTS)
def test_importing_a_script_does_nothing(script: str) -> None:
    """Only definitions, constants and imports at the top level, and the guarded call at the end."""
    body = ast.parse((ROOT / f"{script}.py").read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign)
    for node in body[1:]:
        guarded = isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "__name__ == '__main__'",
        )
        assert guarded or isinstance(node, (*allowed, ast.AnnAssign)), f"line {node.lineno}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_shipped_config_is_parsed_by_every_stage(script: str) -> None:
    module = load_script(script)
    configs = sorted((ROOT / "configs").glob("*.yaml"))
    assert configs
    for config in configs:
        with pytest.raises(SystemExit) as stopped:
            module.main(["--config", str(config), "--help"])
        assert stopped.value.code == 0, config.name
