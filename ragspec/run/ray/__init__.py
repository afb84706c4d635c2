"""A run on many machines: Ray's actors answer what this process reads and writes."""
