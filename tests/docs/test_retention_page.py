"""docs/forks_and_retention.md lists every option of retention with its default."""

from metaloom.pipeline.config.sections import RetentionConfig


def test_every_option_of_retention_is_on_the_page_with_its_default(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "forks_and_retention.md").read_text(encoding="utf-8")
    rows = {
        line.split("|")[1].strip(): line.split("|")[2].strip() for line in page.splitlines() if line.startswith("| `")
    }
    options = {f"`{name}`": "null" for name, field in RetentionConfig.model_fields.items() if field.default is None}
    assert options.items() <= rows.items()
    assert len(options) == len(RetentionConfig.model_fields)
