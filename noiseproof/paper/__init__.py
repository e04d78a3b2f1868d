"""The paper's experiments: settings of every row, records, tables."""
