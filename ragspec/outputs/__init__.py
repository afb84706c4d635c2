"""Outputs: lines in order, resume, and the files beside an output."""
