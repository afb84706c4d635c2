"""The config: sections checked by pydantic, YAML, secrets, and configs of other tools translated."""
