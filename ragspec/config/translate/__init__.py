"""Configs of other tools and of other times as ragspec's."""
