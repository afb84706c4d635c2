"""Where answers go: lines in order, what is finished, what is beside an output."""
