"""Where answers go: lines in order, what is finished, and the files beside an output."""
