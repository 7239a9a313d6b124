from metaloom.storage.format.settings import changed, dotted


def test_every_setting_has_its_full_name():
    settings = {"seed": 1, "env": {"name": "point", "options": {}}, "policy": {"hidden_sizes": [4, 4]}}
    assert list(dotted(settings)) == [
        ("seed", 1),
        ("env.name", "point"),
        ("env.options", {}),
        ("policy.hidden_sizes", [4, 4]),
    ]


def test_what_changed_is_told_by_full_name_with_what_it_was_and_is():
    before = {"seed": 1, "env": {"name": "point", "options": {}}, "stop": None}
    after = {"seed": 2, "env": {"name": "point", "options": {"reward": "dense"}}, "stop": None}
    assert changed(before, after) == {"env.options.reward": (None, "dense"), "seed": (1, 2)}
    assert list(changed(before, after)) == ["env.options.reward", "seed"]
    names = "abcdefgh"
    assert "".join(changed({}, dict.fromkeys(names, 1))) == "".join(changed(dict.fromkeys(names, 1), {})) == names


def test_a_section_without_settings_is_as_if_it_were_not_there():
    assert changed({"options": {}}, {}) == {}
