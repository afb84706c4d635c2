"""Translation of other tools' configs, and of outdated ones, to ragspec's."""
