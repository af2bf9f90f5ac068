"""Read recorded runs: charts, tables, pages, and plans on paper."""
