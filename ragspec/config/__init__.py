"""What the user wrote, checked: sections, YAML, secrets, other tools' configs translated."""
