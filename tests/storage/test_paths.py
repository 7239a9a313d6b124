"""Names of runs cannot leave the folder of runs; paths lead where they say."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaloom import storage
from metaloom.storage.format.places import url_of


@pytest.mark.parametrize(
    "name", ["first", "promp-half-cheetah-dir-20261120-231500", "a", "A_1.b-c", "9", "com", "nul1"]
)
def test_a_name_stands_for_a_run_below_the_root(name):
    assert storage.run_path(name, Path("runs")) == Path("runs") / name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "-rf",
        "a\0b",
        "a\\b",
        "C:",
        "nul",
        "CON.txt",
        "Lpt1",
        "a b",
        "a\nb",
        "ä",
        "x" * 101,
        "a.",
        "~",
    ],
)
def test_a_name_that_some_system_could_not_keep_below_the_root_is_refused(name):
    with pytest.raises(storage.InvalidRunName, match="run name"):
        storage.run_path(name, Path("runs"))


@pytest.mark.parametrize(
    ("given_path", "leads_to"),
    [
        ("./x", Path("x")),
        ("a/b", Path("a/b")),
        ("/data/run", Path("/data/run")),
        ("../other", Path("../other")),
        (Path("x"), Path("x")),
        ("~/x", Path.home() / "x"),
    ],
)
def test_what_holds_a_separator_or_is_a_path_stands_for_itself(given_path, leads_to):
    assert storage.run_path(given_path, "runs") == leads_to


def test_a_path_with_a_null_byte_is_refused():
    with pytest.raises(storage.InvalidRunName):
        storage.run_path("a/b\0c", "runs")


@given(st.text())
def test_no_text_without_a_separator_leads_outside_the_root(text):
    if "/" in text:
        return
    try:
        path = storage.run_path(text, "/srv/runs")
    except storage.InvalidRunName:
        return
    assert path.resolve().parent == Path("/srv/runs").resolve()


@pytest.mark.parametrize("path", ["a/b\nc", "runs/\x1b[31m", "a/\u2028b", "./\x7f"])
def test_a_path_that_cannot_be_told_on_one_line_is_refused_at_the_start(path, tmp_path, creation):
    with pytest.raises(storage.InvalidRunName, match="text without line breaks or control characters"):
        storage.run_path(path, "runs")
    for make in (storage.check_new_run, lambda path: storage.create_run(path, capacity=1, **creation)):
        with pytest.raises(storage.InvalidRunName):
            make(tmp_path / path)
    assert list(tmp_path.iterdir()) == []


def test_a_user_whom_the_system_does_not_know_has_no_folder():
    with pytest.raises(storage.InvalidRunName, match=r"'~nobody-of-that-name/x'; expected an existing user name"):
        storage.run_path("~nobody-of-that-name/x", "runs")


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket/../other", "s3://bucket/.hidden", "s3://bucket//x", "s3://b/x?y"]
)
def test_a_url_does_not_lead_out_of_the_cache(url):
    with pytest.raises(storage.InvalidRunName, match="URL: "):
        storage.folder_of(url)


def test_the_cache_is_where_the_environment_says_or_in_the_folder_of_caches(monkeypatch):
    monkeypatch.setenv("METALOOM_CACHE", "~/here")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert storage.folder_of("s3://bucket/runs/a/") == Path.home() / "here/s3/bucket/runs/a"
    monkeypatch.delenv("METALOOM_CACHE")
    assert storage.folder_of("s3://bucket/runs/a") == Path("/caches/metaloom/s3/bucket/runs/a")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert storage.folder_of("s3://bucket/runs/a") == Path.home() / ".cache/metaloom/s3/bucket/runs/a"


@pytest.mark.parametrize(
    ("folder", "url"),
    [
        ("s3/bucket/runs/a", "s3://bucket/runs/a"),
        ("s3/bucket", "s3://bucket"),
        ("s3", None),
        (".", None),
        ("s3/bucket/.a.log", None),
        ("/elsewhere/s3/bucket", None),
    ],
)
def test_a_folder_in_the_cache_has_a_url_unless_it_is_hidden_or_holds_no_bucket(folder, url, monkeypatch):
    monkeypatch.setenv("METALOOM_CACHE", "/cache")
    assert url_of(Path("/cache") / folder) == url
