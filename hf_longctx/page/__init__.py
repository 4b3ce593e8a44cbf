"""The page of a run: charts and tables from its journal and its evaluations, in one HTML file."""
