"""Labels of rows: next tokens, classes of tokens, and classes or numbers of documents."""
