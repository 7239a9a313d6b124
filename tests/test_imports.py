"""Imports, beyond import-linter's contracts: no module imports itself by way of others."""

import grimp


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("metaloom", exclude_type_checking_imports=True)
    circles = {
        f"{module} -> {' -> '.join(graph.find_shortest_chain(other, module) or ())}"
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
        if other in graph.modules and module in graph.find_upstream_modules(other)
    }
    assert circles == set()
