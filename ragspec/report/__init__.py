"""A benchmark's results as one HTML file: charts (Vega-Lite, drawn to SVG), words, and answers token by token."""
