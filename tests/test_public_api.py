"""`import metaloom`: what it offers, and that it costs nothing until it is used."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import metaloom


@pytest.mark.parametrize("name", metaloom._PLACES)
def test_every_name_of_the_package_leads_to_a_documented_object(name):
    assert name in dir(metaloom)
    assert getattr(metaloom, name).__doc__


def test_a_name_it_does_not_have_is_an_attribute_error_with_those_it_has():
    with pytest.raises(AttributeError, match=r"no attribute 'opne_run'; it has .*open_run"):
        _ = metaloom.opne_run


def test_its_version_is_the_installed_one():
    assert metaloom.__version__ == version("metaloom")


def test_importing_it_imports_nothing_else():
    code = "import sys; before = {*sys.modules}; import metaloom; print(*sorted({*sys.modules} - before))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name for name in told.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert imported == {"metaloom"}
