"""Imports, beyond import-linter's contracts: no module imports itself by way of others."""

import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("metaloom", exclude_type_checking_imports=True)
    circles = {
        f"{module} -> {' -> '.join(graph.find_shortest_chain(other, module) or ())}"
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
        if other in graph.modules and module in graph.find_upstream_modules(other)
    }
    assert circles == set()


def test_the_package_is_found_from_the_folder_that_contains_the_clone(tmp_path):
    assert 'echo "$(CURDIR)" > "$(SITE)/metaloom.pth"' in (ROOT / "Makefile").read_text()
    (tmp_path / "metaloom").symlink_to(ROOT)  # a clone of this name is a namespace package to whoever is above it
    code = f"import sys; sys.path.append({str(ROOT)!r}); import metaloom; print(metaloom.open_run.__name__)"
    used = [sys.executable, "-c", code]
    done = subprocess.run(used, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "open_run\n", done.stderr
